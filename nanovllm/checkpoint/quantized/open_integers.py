"""Open weights of integers that are packed into 32-bit words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.checkpoint.quantized.checks import FLOATS, check_matrix, check_part
from nanovllm.checkpoint.quantized.weight import (
    QuantizedPiece,
    in_groups,
    quantized_tensor,
    read_part,
)
from nanovllm.checkpoint.quantized.weight_format import Parts, QuantLayout
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from nanovllm.checkpoint.quantized.integers import Integers, Packing


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A tensor that holds a matrix [outputs, columns], of numbers or of words of integers."""

    tensor: StoredTensor
    packing: Packing
    per_word: tuple[int, int] = (1, 1)  # number of outputs and of columns that an element holds
    convert: Callable[[Tensor], Tensor] = lambda stored: stored  # applied before unpacking

    def check(self, num_outputs: int, num_columns: int, *dtypes: str) -> None:
        shape = -(-num_outputs // self.per_word[0]), -(-num_columns // self.per_word[1])
        check_part(self.tensor, shape[::-1] if self.packing.is_transposed else shape, *dtypes)

    def read(self, outputs: slice, columns: slice) -> Tensor:
        index = [
            slice(part.start // count, -(-part.stop // count))
            for part, count in zip((outputs, columns), self.per_word, strict=True)
        ]
        if self.packing.is_transposed:
            values = self.convert(read_part(self.tensor, *index[::-1]).t())
        else:
            values = self.convert(read_part(self.tensor, *index))
        if self.per_word[0] > 1:
            values = _unpack_outputs(values, self.packing.positions or range(self.per_word[0]))
        elif self.per_word[1] > 1:
            values = _unpack_columns(values, self.per_word[1])
        return values[: outputs.stop - outputs.start, : columns.stop - columns.start]


def open_integers(stored: Integers, parts: Parts) -> StoredTensor:
    """Return a weight that is read in whole words and, if they are consecutive, in whole groups."""
    packing, per_word = stored.packing, 32 // stored.bits
    packed = (per_word, 1) if packing.positions else (1, per_word)
    values = StoredMatrix(parts[packing.values], packing, packed)
    if packing.shape:
        check_part(parts[packing.shape], (2,), "int64", "int32")
        num_outputs, num_inputs = read_part(parts[packing.shape]).tolist()
    else:
        rows, columns = check_matrix(values.tensor, "int32")
        rows, columns = (columns, rows) if packing.is_transposed else (rows, columns)
        num_outputs, num_inputs = rows * packed[0], columns * packed[1]
    values.check(num_outputs, num_inputs, "int32")
    size = max(num_inputs, 1) if stored.group_size == -1 else stored.group_size
    num_groups = -(-num_inputs // size)
    scales = StoredMatrix(parts[packing.scales], packing)
    scales.check(num_outputs, num_groups, *FLOATS)
    zeros = _open_zeros(stored, parts, num_outputs, num_groups)
    g_idx = parts[packing.g_idx] if stored.desc_act else parts.get(packing.g_idx)
    groups_of_inputs = None if g_idx is None else _read_groups(g_idx, num_inputs, size)

    def read(outputs: slice, inputs: slice) -> QuantizedPiece:
        groups, group_of = in_groups(inputs, size)
        if groups_of_inputs is not None:
            groups, group_of = slice(0, num_groups), groups_of_inputs[inputs]
        by_group = zeros if isinstance(zeros, int) else zeros.read(outputs, groups)
        by_output = scales.read(outputs, groups)
        return QuantizedPiece(values.read(outputs, inputs), by_output, by_group, group_of)

    unit = values.per_word[0] if isinstance(zeros, int) else zeros.per_word[0], values.per_word[1]
    layout = _layout(stored, scales, zeros) if groups_of_inputs is None else None
    if groups_of_inputs is None and stored.group_size != -1:
        unit = unit[0], math.lcm(unit[1], size)
    return quantized_tensor(values.tensor, (num_outputs, num_inputs), unit, layout, read)


def _open_zeros(
    stored: Integers, parts: Parts, num_outputs: int, num_groups: int
) -> StoredMatrix | int:
    """Return the zero points, which are packed along the outputs, or the one of all groups."""
    packing, name, middle = stored.packing, stored.packing.zeros, 1 << (stored.bits - 1)
    is_optional = packing.has_optional_zeros and stored.is_symmetric
    tensor = parts.get(name) if is_optional else parts[name]
    if tensor is None:
        return middle
    if packing.has_optional_zeros and tensor.dtype == torch.int8:
        zeros = StoredMatrix(tensor, packing, convert=lambda zero: (zero.int() + middle).byte())
        zeros.check(num_outputs, num_groups, "int8")
        return zeros
    zeros = StoredMatrix(tensor, packing, (32 // stored.bits, 1))
    zeros.check(num_outputs, num_groups, "int32")
    if not stored.zero_offset:
        return zeros
    # Some tools omit the offset of symmetric weights, although they declare version 1 of GPTQ.
    everything = zeros.read(slice(0, num_outputs), slice(0, num_groups))
    if stored.is_symmetric and bool((everything == middle).all()):
        return zeros
    return replace(zeros, convert=partial(_add_offset, stored))


def _add_offset(stored: Integers, words: Tensor) -> Tensor:
    offsets = sum(stored.zero_offset << first for first in range(0, 32, stored.bits))
    if stored.zeros_carry:
        return words + offsets
    # Without carries: version 1 of GPTQ stores a zero point of 0 as the largest integer.
    low = offsets * ((1 << (stored.bits - 1)) - 1)  # all bits but each integer's highest
    return ((words & low) + offsets) ^ (words & ~low)


def _layout(
    stored: Integers, scales: StoredMatrix, zeros: StoredMatrix | int
) -> QuantLayout | None:
    """Return the layout of consecutive groups, with the stored scales' type; None for 8 bits."""
    if stored.layout is None:
        return None
    dtype = str(scales.tensor.dtype).removeprefix("torch.")
    dtype = dtype if dtype in ("float16", "bfloat16") else "float32"
    return replace(stored.layout, has_zeros=not isinstance(zeros, int), scale_dtype=dtype)


def _read_groups(tensor: StoredTensor, num_inputs: int, size: int) -> Tensor | None:
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
