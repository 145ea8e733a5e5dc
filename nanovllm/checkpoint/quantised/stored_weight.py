"""What the formats of quantised weights have in common: parts that are read, then widened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nanovllm.checkpoint import weights
from nanovllm.checkpoint.weights import Codes, Index, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import CodeLayout, Quantisation

Piece = TypeVar("Piece", Tensor, Codes)
Parts = Mapping[str, StoredTensor]  # of one module, by the last part of their names


class StoredWeight(Protocol):
    """A quantised weight [outputs, inputs], not read yet."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def cuts(self) -> tuple[int, int]:
        """A share of outputs or inputs begins and ends at a multiple of these."""

    @property
    def layout(self) -> CodeLayout | None:
        """What `codes_of` returns; None if groups of inputs are not in order, or not of 4 bits."""

    def widen(self, rows: slice, columns: slice) -> Tensor:
        """Return a part as float32, which begins and ends where it may be cut."""

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        """Return such a part as it is stored, if it has a layout."""


@dataclass(frozen=True, slots=True)
class Format:
    """The parts of a module's weight, and what reads them."""

    names: tuple[str, ...]
    open: Callable[[Parts, Quantisation], StoredWeight]
    optional: tuple[str, ...] = ()


def as_tensor(name: str, file: Path, weight: StoredWeight) -> StoredTensor:
    """The weight as if it were stored in float32."""

    def read(index: Index = ()) -> Iterator[Tensor]:
        for piece, part in _read_pieces(weight, index, weight.widen):
            yield piece[part]

    def read_codes(index: Index = ()) -> Iterator[Codes]:
        for piece, (rows, _) in _read_pieces(weight, index, weight.codes_of):
            zeros = None if piece.zeros is None else piece.zeros[rows]
            yield Codes(piece.codes[rows], piece.scales[rows], zeros)

    return StoredTensor(
        name,
        weight.shape,
        file,
        read,
        cuts=weight.cuts,
        layout=weight.layout,
        read_codes=read_codes,
    )


def _read_pieces(
    weight: StoredWeight, index: Index, read: Callable[[slice, slice], Piece]
) -> Iterator[tuple[Piece, tuple[slice, slice]]]:
    """Read some rows after others, whatever part is wanted; say which of a piece belong to it."""
    rows, columns = index or (slice(None), slice(None))
    (first, last, _), (left, right, _) = (
        part.indices(size) for part, size in zip((rows, columns), weight.shape, strict=True)
    )
    unit = weight.cuts[0]
    wide = _outward(left, right, weight.cuts[1], weight.shape[1])
    num_rows = max(weights.PIECE_BYTES // (4 * max(wide.stop - wide.start, 1)) // unit, 1) * unit
    for begin in range(first // unit * unit, last, num_rows):
        high = _outward(begin, min(begin + num_rows, last), unit, weight.shape[0])
        inner = slice(max(first - begin, 0), min(last - begin, num_rows))
        yield read(high, wide), (inner, slice(left - wide.start, right - wide.start))


def _outward(first: int, last: int, unit: int, size: int) -> slice:
    """The smallest slice of whole units around another."""
    return slice(first // unit * unit, min(-(-last // unit) * unit, size))


def read_part(tensor: StoredTensor, *index: slice) -> Tensor:
    """Read a part whole; unlike its pieces it stays valid."""
    pieces = [piece.clone() for piece in tensor.read(index)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def check_matrix(tensor: StoredTensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the sizes of a tensor that must have two."""
    sizes = (*tensor.shape, 1, 1)
    check_part(tensor, sizes[:2], dtype)
    return sizes[0], sizes[1]


def check_part(tensor: StoredTensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
            f"expected {list(shape)}"
        )
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is stored as "
            f"{str(tensor.dtype).removeprefix('torch.')}, expected {names}"
        )
