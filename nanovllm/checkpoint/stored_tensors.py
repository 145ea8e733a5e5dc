"""The tensors of a checkpoint, listed from the file headers and read a few rows at a time."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.checkpoint import gguf
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.quantization import QuantLayout
from nanovllm.errors import CheckpointError, UnsupportedModelError

PIECE_BYTES = 32 << 20  # bytes read at a time: enough to keep every thread busy
Index = tuple[slice, ...]  # the part of a tensor to read; (): all of it
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
FLOATS = tuple(_DTYPES.values())
# The dtypes of quantized weights, besides floats.
_QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}


class Read(Protocol):
    def __call__(self, index: Index = ()) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class QuantizedPiece:
    """Some rows of a quantized weight; dequantized, they are (values - zeros) * scales."""

    values: Tensor  # [rows, inputs]: FP8, or integers (one per byte)
    scales: Tensor  # [rows, groups]
    zeros: Tensor | int = 0  # uint8 [rows, groups], or one zero point for all
    group_of: Tensor | None = None  # group of each input; None: groups are consecutive and equal

    def __len__(self) -> int:
        return len(self.values)


class ReadQuantized(Protocol):
    def __call__(self, index: Index = ()) -> Iterator[Tensor] | Iterator[QuantizedPiece]: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint file that is not read yet."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Read  # yields rows in pieces; a piece is valid until the next one is read
    # Yields a quantized tensor as stored; for GGUF, the bytes of its quant blocks.
    read_quantized: ReadQuantized | None = None
    dtype: torch.dtype = torch.float32  # dtype of the pieces that `read` yields
    layout: QuantLayout | None = None  # layout of `read_quantized`, if kernels can read it


def list_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """List the tensors in the files; only quantized checkpoints may have dtypes besides floats."""
    readers = {"safetensors": _list_safetensors, "bin": _list_bin, "gguf": _list_gguf}
    list_file = readers[checkpoint.weight_format]
    dtypes = _DTYPES | (_QUANTIZED_DTYPES if checkpoint.is_quantized else {})
    tensors = [tensor for file in checkpoint.weight_files for tensor in list_file(file, dtypes)]
    if all(tensor.name != "embed_tokens.weight" for tensor in tensors):
        return tensors
    # In a model saved without its LM head, such as an embedding model, names lack `model.`.
    return [
        tensor
        if tensor.name.startswith("lm_head.")
        else replace(tensor, name=f"model.{tensor.name}")
        for tensor in tensors
    ]


def _list_safetensors(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    mapped = _map_safetensors(path)
    (header_size,) = struct.unpack_from("<Q", mapped)
    first_byte = 8 + header_size
    header: dict[str, Any] = json.loads(mapped[8:first_byte])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), dtypes.get(entry["dtype"], entry["dtype"])
        _check_dtype(path, name, dtype, dtypes)
        offset = first_byte + entry["data_offsets"][0]
        read = partial(_read_mapped, mapped, offset, shape, dtype)
        yield StoredTensor(name, shape, path, read, dtype=dtype)


def _map_safetensors(path: Path) -> mmap.mmap:
    from safetensors import SafetensorError, safe_open

    try:
        # safe_open validates the file, but reports an unreadable one as missing: open it first.
        with path.open("rb") as file, safe_open(path, framework="pt"):
            # Copy-on-write, because torch warns about read-only memory; nothing writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _read_mapped(
    mapped: mmap.mmap,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    index: Index = (),
) -> Iterator[Tensor]:
    whole = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=offset)
    yield from _read_and_release(whole.view(shape), index)


def _list_bin(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    is_zip = zipfile.is_zipfile(path)  # the format before torch 1.6 cannot be memory-mapped
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is not a readable PyTorch checkpoint: {error}") from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path} must hold a state dict, not a {type(tensors).__name__}")
    for name, tensor in tensors.items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_plain = is_dense and not tensor.is_nested and tensor.device.type == "cpu"
        if not isinstance(name, str) or not is_plain:
            raise CheckpointError(f"{path} must hold plain tensors by name, not {name!r:.80}")
        _check_dtype(path, name, tensor.dtype, dtypes)
        read = partial(_read_and_release if is_zip else _split, tensor)
        yield StoredTensor(name, tuple(tensor.shape), path, read, dtype=tensor.dtype)


def _read_and_release(tensor: Tensor, index: Index = ()) -> Iterator[Tensor]:
    """Yield rows, then release their pages: mapped pages count toward this process's memory."""
    for rows in _split(tensor, index):
        yield rows
        first = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = rows.data_ptr() + _span(rows) - first
        if num_bytes > 0 and tensor.is_contiguous() and sys.platform != "win32":
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def _check_dtype(path: Path, name: str, dtype: object, dtypes: Mapping[str, torch.dtype]) -> None:
    if dtype not in dtypes.values():
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is stored as {dtype}; supported: {', '.join(dtypes)}"
        )


def _list_gguf(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    for tensor in gguf.list_tensors(path):
        floats, blocks = tensor.read, tensor.read_blocks
        read_blocks = None if blocks is None else partial(_read_gguf, blocks)
        read = partial(_read_gguf, floats)
        yield StoredTensor(tensor.name, tensor.shape, path, read, read_blocks)


def _read_gguf(
    read: Callable[[slice], Iterator[npt.NDArray[Any]]], index: Index = ()
) -> Iterator[Tensor]:
    rows, *columns = index or (slice(None),)
    of_piece = (slice(None), *columns)
    for array in read(rows):
        yield torch.from_numpy(array)[of_piece]


def _split(tensor: Tensor, index: Index) -> Iterator[Tensor]:
    if tensor.dim() == 0:
        yield tensor
        return
    # Size pieces by whole rows: reading some columns maps the pages of the others as well.
    num_rows = max(PIECE_BYTES // tensor[0].nbytes, 1)
    part = tensor[index]
    for first in range(0, len(part), num_rows):
        yield part[first : first + num_rows]


def _span(rows: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return (last + 1) * rows.itemsize
