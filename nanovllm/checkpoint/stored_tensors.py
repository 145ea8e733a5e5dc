"""The tensors of a checkpoint, listed from the file headers and read a few rows at a time."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nanovllm.checkpoint.embedding_modules import add_prefix
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.multimodal import text_tensors
from nanovllm.checkpoint.quantization import QuantLayout
from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from nanovllm.checkpoint.quantized.weight import QuantizedPiece

PIECE_BYTES = 32 << 20  # bytes read at a time: enough to keep every thread busy
Index = tuple[slice, ...]  # the part of a tensor to read; (): all of it
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATS = tuple(_DTYPES.values())
# Additional dtypes, accepted only in quantized checkpoints.
_QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}

_STACKED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")


class Read(Protocol):
    def __call__(self, index: Index = ()) -> Iterator[Tensor]: ...


class ReadQuantized(Protocol):
    def __call__(self, index: Index = ()) -> Iterator[Tensor] | Iterator[QuantizedPiece]: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint file, read on demand."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Read  # yields rows in pieces; a piece is valid until the next one is read
    # Yields the values without dequantizing them: QuantizedPieces, or for GGUF the bytes of the
    # quant blocks. None: the tensor is dense.
    read_quantized: ReadQuantized | None = None
    dtype: torch.dtype = torch.float32  # dtype of what `read` yields (not set for GGUF)
    layout: QuantLayout | None = None  # layout of the QuantizedPieces, if kernels can read it


def list_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """List the tensors; FP8 and integers are accepted only if the checkpoint is quantized."""
    dtypes = _DTYPES | (_QUANTIZED_DTYPES if checkpoint.is_quantized else {})
    list_file: Callable[[Path], Iterator[StoredTensor]] = partial(_list_safetensors, dtypes=dtypes)
    if checkpoint.weight_format == "bin":
        from nanovllm.checkpoint.bin_file import list_bin

        list_file = partial(list_bin, dtypes=dtypes)
    elif checkpoint.weight_format == "gguf":
        from nanovllm.checkpoint.gguf_tensors import list_gguf

        list_file = list_gguf
    tensors = [tensor for file in checkpoint.weight_files for tensor in list_file(file)]
    tensors = text_tensors(tensors)
    if any(tensor.name == "embed_tokens.weight" for tensor in tensors):
        tensors = add_prefix(tensors)
    return tensors


def _list_safetensors(path: Path, dtypes: Mapping[str, torch.dtype]) -> Iterator[StoredTensor]:
    mapped = _map_safetensors(path)
    (header_size,) = struct.unpack_from("<Q", mapped)
    first_byte = 8 + header_size
    header: dict[str, Any] = json.loads(mapped[8:first_byte])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), dtypes.get(entry["dtype"], entry["dtype"])
        check_dtype(path, name, dtype, dtypes)
        offset = first_byte + entry["data_offsets"][0]
        for part, part_shape in _split_experts(name, shape):
            read = partial(_read_mapped, mapped, offset, part_shape, dtype)
            yield StoredTensor(part, part_shape, path, read, dtype=dtype)
            offset += math.prod(part_shape) * dtype.itemsize


def _split_experts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the weights in a tensor, which may stack all experts."""
    match = _STACKED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return [(name, shape)]
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    part_shape = shape[1] // len(parts), shape[2]
    names = [f"{i}.{part}.weight" for i in range(shape[0]) for part in parts]
    return [(match[1] + each, part_shape) for each in names]


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
    mapped: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype, index: Index = ()
) -> Iterator[Tensor]:
    whole = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=offset)
    yield from read_and_release(whole.view(shape), index)


def read_and_release(tensor: Tensor, index: Index = ()) -> Iterator[Tensor]:
    """Yield rows, and release their pages: mapped pages count toward this process's memory."""
    for rows in split_rows(tensor, index):
        yield rows
        first = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = rows.data_ptr() + _span(rows) - first
        if num_bytes > 0 and tensor.is_contiguous() and sys.platform != "win32":
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def check_dtype(path: Path, name: str, dtype: object, dtypes: Mapping[str, torch.dtype]) -> None:
    if dtype not in dtypes.values():
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is stored as {dtype}; supported: {', '.join(dtypes)}"
        )


def split_rows(tensor: Tensor, index: Index) -> Iterator[Tensor]:
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
