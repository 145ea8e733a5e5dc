"""A tensor in a checkpoint file, read a few rows at a time."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.checkpoint.quantized.weight_format import QuantLayout
from nanovllm.errors import UnsupportedModelError
from nanovllm.ops.quantized_weight import QuantizedPiece

PIECE_BYTES = 32 << 20  # bytes read at a time: enough to keep every thread busy
Index = tuple[slice, ...]  # the part of a tensor to read; (): all of it


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

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


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
