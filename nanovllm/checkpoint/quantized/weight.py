"""A quantized weight of a checkpoint, read in pieces: as quantized values, or dequantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint import stored_tensors as weights
from nanovllm.checkpoint.quantized.checks import check_part
from nanovllm.checkpoint.quantized.weight_format import QuantLayout
from nanovllm.checkpoint.stored_tensors import Index, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.ops.quantized_weight import QuantizedPiece


def quantized_tensor(
    stored: StoredTensor,
    shape: tuple[int, int],
    alignment: tuple[int, int],
    layout: QuantLayout | None,
    read_aligned: Callable[[slice, slice], QuantizedPiece],
) -> StoredTensor:
    """Return a weight [outputs, inputs] that is stored quantized, in `stored` and other tensors.

    `read_aligned` takes slices of outputs and inputs that begin at multiples of `alignment`, and
    end at multiples or at the end. The layout is None if no kernel can read the weight.
    """

    def read_pieces(index: Index) -> Iterator[tuple[QuantizedPiece, tuple[slice, slice]]]:
        """Yield aligned pieces that cover `index`, each with the slices that crop it to `index`."""
        rows, columns = index or (slice(None), slice(None))
        (first, last, _), (left, right, _) = rows.indices(shape[0]), columns.indices(shape[1])
        unit = alignment[0]
        outer_columns = _outward(left, right, alignment[1], shape[1])
        inner_columns = slice(left - outer_columns.start, right - outer_columns.start)
        row_bytes = 4 * max(outer_columns.stop - outer_columns.start, 1)
        num_rows = max(weights.PIECE_BYTES // row_bytes // unit, 1) * unit
        for begin in range(first // unit * unit, last, num_rows):
            outer_rows = _outward(begin, min(begin + num_rows, last), unit, shape[0])
            inner_rows = slice(max(first - begin, 0), min(last - begin, num_rows))
            yield read_aligned(outer_rows, outer_columns), (inner_rows, inner_columns)

    def read(index: Index = ()) -> Iterator[Tensor]:
        for piece, part in read_pieces(index):
            yield dequantize(piece)[part]

    def read_quantized(index: Index = ()) -> Iterator[QuantizedPiece]:
        for piece, (rows, columns) in read_pieces(index):
            zeros = piece.zeros if isinstance(piece.zeros, int) else piece.zeros[rows]
            yield QuantizedPiece(piece.values[rows, columns], piece.scales[rows], zeros)

    name = f"{stored.name.rpartition('.')[0]}.weight"
    return StoredTensor(name, shape, stored.file, read, read_quantized, layout=layout)


def _outward(first: int, last: int, unit: int, size: int) -> slice:
    """Return the smallest slice of whole units that contains first:last, truncated to `size`."""
    return slice(first // unit * unit, min(-(-last // unit) * unit, size))


def dequantize(piece: QuantizedPiece) -> Tensor:
    """Return (values - zeros) * scales in float32."""
    values, group_of = piece.values.float(), piece.group_of
    grouped = values if group_of is not None else values.view(*piece.scales.shape, -1)

    def by_input(numbers: Tensor) -> Tensor:
        if group_of is None:
            return numbers.float().unsqueeze(-1)
        return numbers.float().index_select(1, group_of)

    if isinstance(piece.zeros, Tensor):
        grouped -= by_input(piece.zeros)
    elif piece.zeros:
        grouped -= piece.zeros
    grouped *= by_input(piece.scales)
    return values


def in_groups(inputs: slice, size: int) -> tuple[slice, Tensor | None]:
    """Return the groups that a slice of inputs spans, and the group of each of these inputs.

    The second result is None if the slice consists of whole groups, or lies within one.
    """
    groups = slice(inputs.start // size, -(-inputs.stop // size))
    is_even = groups.stop - groups.start == 1 or not (inputs.start % size or inputs.stop % size)
    group_of = None if is_even else torch.arange(inputs.start, inputs.stop) // size - groups.start
    return groups, group_of


def read_part(tensor: StoredTensor, *index: slice) -> Tensor:
    """Read a slice as one tensor; pieces are copied, as each is valid only until the next read."""
    pieces = [piece.clone() for piece in tensor.read(index)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A tensor that holds a matrix [outputs, columns], of numbers or of words of integers."""

    tensor: StoredTensor
    order: int  # 1: [outputs, columns], -1: [columns, outputs]
    per_word: tuple[int, int]  # number of outputs and of columns that an element holds
    positions: Sequence[int]  # output i of a word is at positions[i]; empty: in order
    convert: Callable[[Tensor], Tensor] = lambda stored: stored  # applied before unpacking

    def read(self, outputs: slice, columns: slice) -> Tensor:
        index = [
            slice(part.start // count, -(-part.stop // count))
            for part, count in zip((outputs, columns), self.per_word, strict=True)
        ]
        stored = read_part(self.tensor, *index[:: self.order])
        values = self.convert(stored if self.order == 1 else stored.t())
        if self.per_word[0] > 1:
            values = _unpack_outputs(values, self.positions or range(self.per_word[0]))
        elif self.per_word[1] > 1:
            values = _unpack_columns(values, self.per_word[1])
        return values[: outputs.stop - outputs.start, : columns.stop - columns.start]

    def holds_only(self, value: int, shape: tuple[int, int]) -> bool:
        return bool((self.read(slice(0, shape[0]), slice(0, shape[1])) == value).all())


def read_groups(tensor: StoredTensor, num_inputs: int, size: int) -> Tensor | None:
    """Read the group of each input; return None if groups are consecutive, or all are -1."""
    check_part(tensor, (num_inputs,), "int32", "int64")
    groups, num_groups = read_part(tensor).long(), -(-num_inputs // size)
    if torch.equal(groups, torch.arange(num_inputs) // size) or bool((groups == -1).all()):
        return None
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} must hold group indices below {num_groups}"
        )
    return groups


def _unpack_columns(words: Tensor, per_word: int) -> Tensor:
    """Unpack [outputs, words] to [outputs, columns], one integer per byte, lowest bits first."""
    # Always copy: a tensor with one column counts as contiguous, whatever the stride of its rows.
    values = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return values if per_word == 4 else torch.stack((values & 15, values >> 4), -1).flatten(-2)


def _unpack_outputs(words: Tensor, positions: Sequence[int]) -> Tensor:
    """Unpack [words, columns] to [outputs, columns], one integer per byte."""
    words, per_word = words.contiguous(), len(positions)
    bits = 32 // per_word
    values = torch.empty(len(words), per_word, words.shape[1], dtype=torch.uint8)
    for i, position in enumerate(positions):
        values[:, i] = (words >> bits * position) & ((1 << bits) - 1)
    return values.flatten(0, 1)
