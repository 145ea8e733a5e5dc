"""GPTQ: numbers packed along the inputs, zero points along the outputs, groups in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import Parts, check_matrix, check_part, read_part
from nanovllm.checkpoint.quantised.words import (
    GroupedCodes,
    dequantise,
    group_size,
    groups_in_order,
    input_cut,
    layout_of,
    per_word,
    read_groups,
    unpack,
    words_of,
)
from nanovllm.checkpoint.weights import FLOATS, Codes, StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.quantisation import CodeLayout, Quantisation


@dataclass(frozen=True, slots=True)
class Gptq:
    codes: StoredTensor  # [words of inputs, outputs]
    zeros: StoredTensor  # [groups, words of outputs]
    scales: StoredTensor  # [groups, outputs]
    group_of: StoredTensor | None  # [inputs]
    zero_offset: int  # what is added to stored zero points
    quantisation: Quantisation

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.codes.shape[0] * per_word(self.quantisation.bits)

    @property
    def cuts(self) -> tuple[int, int]:
        return per_word(self.quantisation.bits), input_cut(self.quantisation)

    @property
    def layout(self) -> CodeLayout | None:
        columns = slice(0, self.shape[1])
        size = group_size(self.quantisation, max(self.shape[1], 1))
        in_order = torch.arange(columns.stop) // size
        is_in_order = self.group_of is None or torch.equal(
            read_groups(self.group_of, columns, self.scales.shape[0]), in_order
        )
        return layout_of(self.quantisation, self.scales, has_zeros=True) if is_in_order else None

    def widen(self, rows: slice, columns: slice) -> Tensor:
        return dequantise(self._read(rows, columns))

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        return self._read(rows, columns).as_codes()

    def _read(self, rows: slice, columns: slice) -> GroupedCodes:
        bits = self.quantisation.bits
        groups, group_of = self._read_groups(columns)
        codes = unpack(read_part(self.codes, words_of(columns, bits), rows).t(), bits)
        zeros = self._read_zeros(groups, words_of(rows, bits)).t()[: rows.stop - rows.start]
        scales = read_part(self.scales, groups, rows).t()
        return GroupedCodes(codes, zeros, scales, group_of)

    def _read_zeros(self, groups: slice, outputs: slice) -> Tensor:
        words = read_part(self.zeros, groups, outputs)
        bits, offset = self.quantisation.bits, self.zero_offset
        if self.quantisation.zeros_carry:
            words += sum(offset << bits * place for place in range(per_word(bits)))
            return unpack(words, bits)
        # The first format stores a zero point of 0 as the largest number.
        return (unpack(words, bits).int() + offset) & ((1 << bits) - 1)

    def _read_groups(self, columns: slice) -> tuple[slice, Tensor | None]:
        """Return the groups to read, and which of them each input is in."""
        size = group_size(self.quantisation, self.shape[1])
        if self.group_of is not None:
            group_of = read_groups(self.group_of, columns, self.scales.shape[0])
            if not torch.equal(group_of, torch.arange(columns.start, columns.stop) // size):
                return slice(None), group_of
        order = groups_in_order(columns, size)
        return order.groups, order.group_of


def open_gptq(parts: Parts, quantisation: Quantisation) -> Gptq:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_words, num_outputs = check_matrix(codes, torch.int32)
    count = per_word(quantisation.bits)
    num_inputs = num_words * count
    num_groups = -(-num_inputs // group_size(quantisation, max(num_inputs, 1)))
    check_part(zeros, (num_groups, -(-num_outputs // count)), torch.int32)
    check_part(scales, (num_groups, num_outputs), *FLOATS)
    group_of = parts.get("g_idx")
    if group_of is not None:
        check_part(group_of, (num_inputs,), torch.int32, torch.int64)
    elif quantisation.desc_act:
        raise CheckpointError(f"{codes.file}: {codes.name!r} needs a g_idx, as desc_act says")
    offset = 0 if _holds_middles(zeros, num_outputs, quantisation) else quantisation.zero_offset
    return Gptq(codes, zeros, scales, group_of, offset, quantisation)


def _holds_middles(zeros: StoredTensor, num_outputs: int, quantisation: Quantisation) -> bool:
    """Whether zero points are those of symmetric weights as they are meant, whatever the format.

    Some tools store them so and name the first format, in which they would be one too high.
    """
    if not quantisation.is_symmetric or quantisation.zero_offset == 0:
        return False
    stored = unpack(read_part(zeros), quantisation.bits)[:, :num_outputs]
    return bool((stored == 1 << (quantisation.bits - 1)).all())
