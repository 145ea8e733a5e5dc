"""AWQ: numbers of 4 bits packed along the outputs, whose eight in a word are interleaved."""

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
    words_of,
)
from nanovllm.checkpoint.weights import FLOATS, Codes, StoredTensor
from nanovllm.quantisation import CodeLayout, Quantisation

# Where in a word the numbers of eight outputs are, counted from its lowest bits.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class Awq:
    codes: StoredTensor  # [inputs, words of outputs]
    zeros: StoredTensor  # [groups, words of outputs]
    scales: StoredTensor  # [groups, outputs]
    quantisation: Quantisation

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1], self.codes.shape[0]

    @property
    def cuts(self) -> tuple[int, int]:
        return len(PLACES), input_cut(self.quantisation)

    @property
    def layout(self) -> CodeLayout | None:
        return layout_of(self.quantisation, self.scales, has_zeros=True)

    def widen(self, rows: slice, columns: slice) -> Tensor:
        return dequantise(self._read(rows, columns))

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        return self._read(rows, columns).as_codes()

    def _read(self, rows: slice, columns: slice) -> GroupedCodes:
        size, words = group_size(self.quantisation, self.shape[1]), words_of(rows, 4)
        order = groups_in_order(columns, size)
        codes = _in_order(read_part(self.codes, columns, words))
        zeros = _in_order(read_part(self.zeros, order.groups, words))
        scales = read_part(self.scales, order.groups, rows).t()
        return GroupedCodes(codes, zeros, scales, order.group_of)


def _in_order(words: Tensor) -> Tensor:
    """Spread [n, words of outputs] to [outputs, n]."""
    by_output = words.t().contiguous()
    numbers = torch.empty(len(by_output), len(PLACES), len(words), dtype=torch.uint8)
    for i, place in enumerate(PLACES):
        numbers[:, i] = (by_output >> 4 * place) & 15
    return numbers.flatten(0, 1)


def open_awq(parts: Parts, quantisation: Quantisation) -> Awq:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    num_inputs, num_words = check_matrix(codes, torch.int32)
    num_groups = -(-num_inputs // group_size(quantisation, max(num_inputs, 1)))
    check_part(zeros, (num_groups, num_words), torch.int32)
    check_part(scales, (num_groups, num_words * len(PLACES)), *FLOATS)
    return Awq(codes, zeros, scales, quantisation)
