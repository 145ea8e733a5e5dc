"""Whole numbers of 4 or 8 bits in words of 32, and the groups that share scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import read_part
from nanovllm.checkpoint.weights import Codes, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import CodeLayout, Quantisation


def per_word(bits: int) -> int:
    return 32 // bits


def unpack(words: Tensor, bits: int) -> Tensor:
    """Spread [..., words] to [..., numbers] as bytes, those in the lowest bits first."""
    # A copy: what has one column counts as contiguous, however far apart its rows are.
    numbers = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def words_of(numbers: slice, bits: int) -> slice:
    count = per_word(bits)
    return slice(numbers.start // count, -(-numbers.stop // count))


def group_size(quantisation: Quantisation, num_inputs: int) -> int:
    return num_inputs if quantisation.group_size == -1 else quantisation.group_size


def input_cut(quantisation: Quantisation) -> int:
    """Where inputs may be cut: between groups, if these are in order and do not hold them all."""
    has_groups = quantisation.group_size != -1 and not quantisation.desc_act
    count = per_word(quantisation.bits)
    return math.lcm(quantisation.group_size, count) if has_groups else count


def read_groups(tensor: StoredTensor, inputs: slice, num_groups: int) -> Tensor:
    """Read the group of each input."""
    groups = read_part(tensor, inputs).long()
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} must hold numbers of {num_groups} groups"
        )
    return groups


@dataclass(frozen=True, slots=True)
class GroupsInOrder:
    """The groups of some inputs, and which of them each is in; None: all have equally many."""

    groups: slice
    group_of: Tensor | None


def groups_in_order(inputs: slice, size: int) -> GroupsInOrder:
    groups = slice(inputs.start // size, -(-inputs.stop // size))
    is_even = groups.stop - groups.start == 1 or not (inputs.start % size or inputs.stop % size)
    group_of = None if is_even else torch.arange(inputs.start, inputs.stop) // size - groups.start
    return GroupsInOrder(groups, group_of)


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    codes: Tensor  # [outputs, inputs]
    zeros: Tensor | int  # [outputs, groups], or one for all
    scales: Tensor  # [outputs, groups]
    group_of: Tensor | None  # as in GroupsInOrder

    def as_codes(self) -> Codes:
        """With groups in order, of which the last may have fewer inputs."""
        zeros = None if isinstance(self.zeros, int) else self.zeros.to(torch.uint8)
        return Codes(self.codes, self.scales, zeros)


def layout_of(
    quantisation: Quantisation, scales: StoredTensor, has_zeros: bool
) -> CodeLayout | None:
    """How codes of 4 bits in groups in order are kept."""
    if quantisation.bits != 4:
        return None
    dtype = str(scales.dtype).removeprefix("torch.")
    scale_dtype = dtype if dtype in ("float16", "bfloat16") else "float32"
    return CodeLayout("int4", quantisation.group_size, has_zeros, scale_dtype)


def dequantise(grouped: GroupedCodes) -> Tensor:
    """(codes - zeros) * scales of [outputs, inputs]."""
    scales, group_of = grouped.scales, grouped.group_of
    values = grouped.codes.float()
    spread = values if group_of is not None else values.view(*scales.shape, -1)
    for numbers, apply in ((grouped.zeros, spread.sub_), (scales, spread.mul_)):
        if isinstance(numbers, int):
            apply(numbers)
        elif group_of is None:
            apply(numbers.float().unsqueeze(-1))
        else:
            apply(numbers.float().index_select(1, group_of))
    return values
