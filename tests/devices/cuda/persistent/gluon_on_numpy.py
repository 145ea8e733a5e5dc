"""An interpreter that runs gluon functions on numpy, by logical shape: layouts are ignored.

Inline PTX runs on tensors [8 warps, 8, 4], one element per thread, as `mma` distributes its
operands. Only the instructions of tile_mma.py and attention.py are implemented. A poll tries once
or twice. TMA copies complete at once, and waits do nothing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import nanovllm.devices.cuda

FOLDER = Path(nanovllm.devices.cuda.__file__).parent / "persistent"


class Array(np.ndarray):
    """A gluon tensor; bfloat16 is represented by its bits, as uint16."""

    def to(self, dtype: str, bitcast: bool = False) -> Array:
        if bitcast:
            bits = self.astype(np.int32) if self.dtype == np.int64 else self  # numpy upcasts
            return array(bits.view(TYPES[dtype]))
        if dtype == "bfloat16":
            return round_to_bfloat16(self)
        if dtype == "float32" and self.dtype == np.uint16:
            return array((self.astype(np.uint32) << 16).view(np.float32))
        return array(self.astype(TYPES[dtype]))

    def __iadd__(self, other: Any) -> Array:  # type: ignore[misc,override]
        """Return a new array, as gluon does: other names may refer to this one."""
        return array(self + other)

    def __isub__(self, other: Any) -> Array:  # type: ignore[misc,override]
        return array(self - other)


TYPES = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
}


def array(values: Any) -> Array:
    return np.asarray(values, order="C").view(Array)


def round_to_bfloat16(values: np.ndarray) -> Array:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return array(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


class Shared:
    """Shared memory, or a view of it; `start` is the address of the allocation."""

    def __init__(self, values: np.ndarray, start: int | None = None) -> None:
        self.values = values
        self.start = values.ctypes.data if start is None else start

    def store(self, values: np.ndarray) -> None:
        assert values.shape == self.values.shape
        self.values[...] = values

    def load(self, layout: object) -> Array:
        return array(self.values.copy())

    def index(self, i: int) -> Shared:
        return Shared(self.values[i], self.start)

    def slice(self, first: int, length: int, dim: int = 0) -> Shared:
        part = (slice(None),) * dim + (slice(first, first + length),)
        return Shared(self.values[part], self.start)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.values.transpose(order), self.start)

    def _reinterpret(self, dtype: str, shape: list[int], layout: object) -> Shared:
        assert self.values.flags.c_contiguous
        return Shared(self.values.reshape(-1).view(TYPES[dtype]).reshape(shape), self.start)


class Pointer:
    """Pointers into a flat array; offsets count its elements, or bytes after `.to("int64")`.

    `late` is called when the first poll finds a value missing, and stores it.
    """

    def __init__(
        self, memory: np.ndarray, at: Any = 0, late: Callable[[], None] | None = None
    ) -> None:
        self.memory, self.at, self.late = memory, at, late

    def __add__(self, other: Any) -> Pointer:
        is_zero = isinstance(other, Pointer)  # `addresses * 0 + flag` broadcasts the flag
        return self if is_zero else Pointer(self.memory, self.at + other)

    def __mul__(self, zero: int) -> Pointer:
        return self

    def to(self, dtype: str) -> Pointer:
        return Pointer(self.memory.view(np.uint8), self.at * self.memory.itemsize, self.late)

    def words(self, offset: int, count: int, kind: type = np.int32) -> tuple[np.ndarray, Any]:
        """The array as words, and indices of `count` words at `offset` bytes from each pointer."""
        memory = self.memory.view(kind)
        first = (np.asarray(self.at) * self.memory.itemsize + offset) // memory.itemsize
        return memory, first[..., None] + np.arange(count)


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **options: Any) -> Array:
    at, mask = np.asarray(pointer.at), True if mask is None else mask
    mask, at = np.broadcast_arrays(mask, at)
    return array(np.where(mask, pointer.memory[np.where(mask, at, 0)], other))


def store(pointer: Pointer, values: Any, mask: Any = True, **options: Any) -> None:
    mask, at, values = np.broadcast_arrays(mask, pointer.at, values)
    pointer.memory[at[mask]] = values[mask]


class Source:
    """A TMA descriptor: the values of a tensor, and the shape of a copy."""

    def __init__(self, values: np.ndarray, block: list[int]) -> None:
        self.values, self.block = values, block


def copy(source: Source, coordinates: list[Any], full: object, target: Shared) -> None:
    """Copy a block to shared memory by TMA; values out of bounds are zero."""
    assert target.values.shape == tuple(source.block)
    assert (target.values.ctypes.data - target.start) % 128 == 0, (
        "a TMA destination must be aligned"
    )
    target.values[...] = 0
    starts = [int(each) for each in coordinates]
    counts = [
        max(0, min(size - start, length))
        for size, start, length in zip(source.values.shape, starts, source.block, strict=True)
    ]
    if all(counts):
        inside = tuple(slice(s, s + n) for s, n in zip(starts, counts, strict=True))
        target.values[tuple(slice(n) for n in counts)] = source.values[inside]


def inline_asm(code: str, constraints: str, args: Any, types: Any, is_pure: bool, pack: int) -> Any:
    outputs = constraints.count("=")
    shape = np.broadcast_shapes(*(np.shape(getattr(arg, "at", arg)) for arg in args))
    if len(shape) == 4:  # keys or queries, [4, 8, segments, 4]: a warp has one segment
        moved = [np.broadcast_to(arg, shape).swapaxes(1, 2).reshape(-1, 8, 4) for arg in args]
        found = inline_asm(code, constraints, moved, types, is_pure, pack)
        split = (shape[0], shape[2], shape[1], shape[3])
        return tuple(array(each.reshape(split).swapaxes(1, 2)) for each in found)
    registers: dict[str, Any] = {}
    for i, arg in enumerate(args):
        for part in range(pack):
            registers[f"${outputs + i * pack + part}"] = _part(arg, shape, pack, part)
    statements = re.sub(r"[{}]\s*(?=\.reg|$)", "", code).split(";")
    late = [arg.late for arg in args if isinstance(arg, Pointer) and arg.late]
    while statements:
        line = re.sub(r"^[}\s]*([A-Z]+:\s*)*", "", statements.pop(0))
        if line == "setp.ne.u32 p, f, 0":  # a poll ends here, unless a value is missing
            if not registers["f"].any():
                break
            assert late, "a polled value was never stored"
            late.pop()()
            statements = ("mov.u32 f, 0" + code.partition("AGAIN: mov.u32 f, 0")[2]).split(";")
        elif line and ".reg" not in line:
            _run(line, registers)
    dtypes = types if isinstance(types, tuple) else (types,)
    found = []
    for i, dtype in enumerate(dtypes):
        parts = [_bits(registers[f"${i * pack + part}"]) for part in range(pack)]
        whole = np.stack(parts, -1).reshape(shape) if pack > 1 else np.broadcast_to(parts[0], shape)
        found.append(array(np.ascontiguousarray(whole).view(TYPES[dtype])))
    return tuple(found) if isinstance(types, tuple) else found[0]


def _part(arg: Any, shape: tuple[int, ...], pack: int, part: int) -> Any:
    """Every `pack`-th element, from `part` on."""
    if isinstance(arg, Pointer):
        return Pointer(arg.memory, _part(arg.at, shape, pack, part))
    whole = np.broadcast_to(arg, shape)
    return np.ascontiguousarray(whole if pack == 1 else whole.reshape(-1, pack)[:, part])


def _run(line: str, registers: dict[str, Any]) -> None:
    guard = True
    if line.startswith("@"):
        name, _, line = line[1:].partition(" ")
        guard = registers[name]
    name, _, rest = line.partition(" ")
    operands = [
        each.strip()
        for each in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", rest)
        if each.strip()
    ]
    if name.startswith("mma"):
        _multiply(operands, registers, is_float16=".f16.f16." in name)
    elif name.startswith(("ld.", "st.")):
        _access(name, operands, registers, guard)
    elif not name.startswith("createpolicy") and "bar." not in name:
        target, *sources = operands
        values = [_value(source, registers) for source in sources]
        if target.startswith("{"):  # a word becomes two 16-bit registers
            halves = _bits(values[0])
            for i, half in enumerate(target.strip("{}").split(",")):
                registers[half.strip()] = (halves >> np.uint32(16 * i)) & np.uint32(0xFFFF)
        else:
            registers[target] = OPERATIONS[name](*values)


def _access(name: str, operands: list[str], registers: dict[str, Any], guard: Any) -> None:
    """Load words from a pointer's addresses, or store them, where the guard is true."""
    address, names = operands[:2] if name.startswith("st.") else operands[1::-1]
    pointer, _, offset = address[1:-1].partition(" + ")
    words = [each.strip() for each in names.strip("{}").split(",")]
    kind = np.uint16 if name.endswith(".u16") else np.int32
    memory, at = registers[pointer].words(int(offset or 0), len(words), kind)
    guard = np.broadcast_to(guard, at.shape[:-1])
    for i, word in enumerate(words):
        if name.startswith("st."):
            values = np.broadcast_to(_bits(registers[word]).view(np.int32), guard.shape)
            memory[at[..., i][guard]] = values[guard]
        else:
            before = _bits(registers.get(word, np.zeros((), np.uint32)))
            found = memory[np.where(guard, at[..., i], 0)]
            found = found.astype(np.uint32) if kind is np.uint16 else found.view(np.uint32)
            registers[word] = np.where(guard, found, before)


def _value(source: str, registers: dict[str, np.ndarray]) -> Any:
    if source.startswith("0f"):
        return np.full((), int(source[2:], 16), np.uint32).view(np.float32)
    if source[0].isdigit() or source[0] == "-":
        return np.uint32(int(source, 0) & 0xFFFFFFFF)
    return registers[source]


def _bits(values: Any) -> Any:
    is_array = isinstance(values, np.ndarray) and values.dtype != bool
    if is_array and values.dtype.itemsize == 8:
        values = values.astype(np.int32)  # numpy upcasts
    return values.view(np.uint32) if is_array else values


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    assert table == 0xEA
    return (_bits(a) & _bits(b)) | _bits(c)


def _swap_lanes(values: np.ndarray, distance: Any, clamp: Any, mask: Any) -> np.ndarray:
    lanes = values.reshape(-1, 32)[:, np.arange(32) ^ int(distance)]
    return lanes.reshape(values.shape)


def _halves(a: Any, b: Any, selector: Any) -> Any:
    shift = np.uint32(0 if selector == 0x5410 else 16)
    low = (_bits(a) >> shift) & np.uint32(0xFFFF)
    return low | ((_bits(b) >> shift) << np.uint32(16))


def _pack(high: Any, low: Any) -> Any:
    low, high = (round_to_bfloat16(each).astype(np.uint32) for each in (low, high))
    return low | (high << np.uint32(16))


def _pack_float16(high: Any, low: Any) -> Any:
    low, high = (each.astype(np.float16).view(np.uint16).astype(np.uint32) for each in (low, high))
    return low | (high << np.uint32(16))


def _pack_fp8(high: Any, low: Any) -> Any:
    both = torch.from_numpy(np.stack((low, high), -1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return both.view(torch.uint8).numpy().view(np.uint16)[..., 0].astype(np.uint32)


def _upcast_fp8(pair: Any) -> Any:
    values = torch.from_numpy(np.ascontiguousarray(pair, np.uint16)[..., None].view(np.uint8))
    return values.view(torch.float8_e4m3fn).half().numpy().view(np.uint32)[..., 0]


def _as_array(a: Any) -> Any:
    return a if isinstance(a, np.ndarray) else np.full((), a, np.uint32)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": _as_array,
    "mov.u32": _as_array,
    "mov.f32": lambda a: a,
    "prmt.b32": _halves,
    "cvt.rn.bf16x2.f32": _pack,
    "cvt.rn.f16x2.f32": _pack_float16,
    "cvt.rn.satfinite.e4m3x2.f32": _pack_fp8,
    "cvt.rn.f16x2.e4m3x2": _upcast_fp8,
    "cvt.u16.u32": lambda a: _bits(a) & np.uint32(0xFFFF),
    "cvt.u32.u16": lambda a: a,
    "setp.ne.u32": lambda a, b: _bits(a) != b,
    "setp.eq.u32": lambda a, b: _bits(a) == b,
    "setp.gt.s32": lambda a, b: np.asarray(a).astype(np.int64) > int(b),
    "selp.u32": lambda a, b, p: np.where(p, a, b).astype(np.uint32),
    "max.u32": lambda a, b: np.maximum(_bits(a), _bits(b)),
    "sub.u32": lambda a, b: _bits(a) - _bits(b),
    "add.u32": lambda a, b: _bits(a) + b,
    "or.b32": lambda a, b: _bits(a) | _bits(b),
    "add.f32": lambda a, b: a + b,
    "and.b32": lambda a, b: _bits(a) & _bits(b),
    "shl.b32": lambda a, b: _bits(a) << b,
    "shr.u32": lambda a, b: _bits(a) >> b,
    "lop3.b32": _lop3,
    "shfl.sync.bfly.b32": _swap_lanes,
}


def _multiply(
    operands: list[str], registers: dict[str, np.ndarray], is_float16: bool = False
) -> None:
    """m16n8k16: thread [i, j] holds elements of rows i and i + 8 of A, and of column i of B."""
    sums, left, right, _ = ([each.strip() for each in o[1:-1].split(",")] for o in operands)
    b = _pairs(registers[right[0]], registers[right[1]], is_float16)
    for part in range(2):  # rows 0 to 7 of A, then rows 8 to 15
        a = _pairs(registers[left[part]], registers[left[part + 2]], is_float16)
        product = np.einsum("wmk,wnk->wmn", *np.broadcast_arrays(a, b)).reshape(-1, 8, 4, 2)
        for i, name in enumerate(sums[2 * part :][:2]):
            registers[name] = (registers[name] + product[..., i]).astype(np.float32)


def _pairs(first: np.ndarray, second: np.ndarray, is_float16: bool) -> np.ndarray:
    """Unpack two words of two 16-bit values in each thread to float64 [8 warps, 8 rows, 16]."""
    words = np.stack(np.broadcast_arrays(_bits(first), _bits(second)), -1)
    if words.shape[-3:-1] != (8, 4):
        words = np.broadcast_to(words, (*words.shape[:-3], 8, 4, 2))
    if is_float16:
        return np.ascontiguousarray(words).view(np.float16).reshape(-1, 8, 16).astype(np.float64)
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), -1)
    return halves.view(np.float32).reshape(-1, 8, 16).astype(np.float64)


class Number(int):
    @property
    def value(self) -> int:
        return int(self)


class Text(str):
    @property
    def value(self) -> str:
        return str(self)


class Several(tuple[Any, ...]):
    @property
    def value(self) -> tuple[Any, ...]:
        return tuple(self)


def constexpr(value: Any) -> Any:
    kinds: dict[type, Callable[[Any], Any]] = {int: Number, str: Text, tuple: Several}
    return kinds.get(type(value), lambda same: same)(value)


def where(condition: Any, one: Any, other: Any) -> Array:
    """Like gluon's `where`: a scalar takes the dtype of the other operand, by default int32."""
    types = [each.dtype for each in (one, other) if isinstance(each, np.ndarray)]
    is_float = isinstance(one, float) or isinstance(other, float)
    dtype = types[0] if types else np.float32 if is_float else np.int32
    return array(np.where(condition, one, other).astype(dtype))


def split(t: np.ndarray) -> tuple[Array, Array]:
    return array(t[..., 0]), array(t[..., 1])


def make_language() -> ModuleType:
    gl: Any = ModuleType("language")
    for name in TYPES:
        setattr(gl, name, name)
    for name in ("Blocked", "Slice", "SwizzledShared", "NVMMAShared"):
        setattr(gl, f"{name}Layout", lambda *args: SimpleNamespace(value=args))
    gl.constexpr, gl.static_range, gl.split = constexpr, range, split
    gl.tensor = gl.shared_memory_descriptor = object
    gl.reshape = lambda t, shape: array(t.reshape(shape))
    gl.permute = lambda t, order: array(t.transpose(order))
    gl.join = lambda a, b: array(np.stack((a, b), -1))
    gl.expand_dims = lambda t, axis: array(np.expand_dims(t, axis))
    gl.convert_layout = lambda t, layout, assert_trivial=False: t
    gl.arange = lambda begin, end, layout: array(np.arange(begin, end, dtype=np.int32))
    gl.where = where
    gl.maximum = lambda a, b: array(np.maximum(a, b))
    gl.minimum = lambda a, b: array(np.minimum(a, b))
    gl.abs = lambda t: array(np.abs(t))
    gl.exp2 = lambda t: array(np.exp2(t))
    gl.rsqrt = lambda t: array(1 / np.sqrt(t))
    gl.full = lambda shape, value, dtype, layout: array(np.full(shape, value, TYPES[dtype]))
    gl.to_tensor = np.int32
    gl.load, gl.store = load, store
    gl.exp = lambda t: array(np.exp(t))
    gl.sum, gl.max = (lambda t, axis: array(t.sum(axis))), (lambda t, axis: array(t.max(axis)))
    gl.zeros = lambda shape, dtype, layout: array(np.zeros(shape, TYPES[dtype]))
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(np.zeros(shape, TYPES[dtype]))
    gl.inline_asm_elementwise = inline_asm
    gl.barrier = lambda: None
    return gl


def load_modules(*names: str) -> list[Any]:
    """Load modules of the persistent kernel on numpy; each may import those before it."""
    plain = lambda function: function  # noqa: E731
    language = make_language()
    nothing = lambda *args, **options: None  # noqa: E731
    barrier = SimpleNamespace(wait=nothing, arrive=nothing, expect=nothing)
    engine = SimpleNamespace(async_copy_global_to_shared=copy)
    modules: dict[str, Any] = {
        "triton.experimental.gluon": SimpleNamespace(
            jit=plain, constexpr_function=plain, language=language
        ),
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(
            mbarrier=barrier, tma=engine
        ),
        "triton.language.core": SimpleNamespace(_aggregate=plain),
    }
    modules["triton.experimental"] = SimpleNamespace(gluon=modules["triton.experimental.gluon"])
    loaded = []
    for name in names:
        spec = importlib.util.spec_from_file_location(f"on_numpy.{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, modules):
            spec.loader.exec_module(module)
        modules[f"nanovllm.devices.cuda.persistent.{name}"] = module
        loaded.append(module)
    return loaded
