"""Rows of a weight that stays quantised, while they are filled from what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fp8 import FP8
from nanovllm.kernels.stored_weights import (
    BLOCK,
    MIDDLE,
    Fp8Weight,
    StoredWeight,
    order_codes,
    pack_words,
    quantise_blocks,
    quantise_int4,
    quantise_rows,
)

Fill = Callable[[Tensor, Tensor], object]  # copies rows to where they belong, as Platform.fill


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Some rows of a kept weight, to be filled with what a checkpoint stores."""

    weight: StoredWeight
    first: int
    count: int
    group: int  # as stored: inputs that share a scale; -1: all

    def put(
        self, first: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, fill: Fill
    ) -> None:
        """Fill rows from `first` on; zeros and scales are those of groups as they are stored."""
        rows = slice(self.first + first, self.first + first + len(codes))
        fill(self.weight.scales[rows], self._by_group(scales))
        if isinstance(self.weight, Fp8Weight):
            staged = torch.empty(codes.shape, dtype=FP8, device=self.weight.codes.device)
            fill(staged, codes)
            self.weight.codes[rows] = order_codes(staged)
            return
        staged = torch.empty(codes.shape, dtype=torch.uint8, device=self.weight.words.device)
        fill(staged, codes)
        self.weight.words[rows] = pack_words(staged)
        if self.weight.zeros is not None:
            middle = torch.full(scales.shape, MIDDLE, dtype=torch.uint8, device=scales.device)
            fill(self.weight.zeros[rows], self._by_group(middle if zeros is None else zeros))

    def put_floats(self, values: Tensor, fill: Fill) -> None:
        """Quantise all rows, each group by its largest number."""
        if isinstance(self.weight, Fp8Weight):
            rounded = (quantise_blocks if self.weight.has_blocks else quantise_rows)(values)
            codes = order_codes(rounded.codes)
            fill(self.weight.codes[self.first : self.first + self.count], codes)
            fill(self.weight.scales[self.first : self.first + self.count], rounded.scales)
            return
        codes, scales = quantise_int4(values, self.weight.group)
        kept = WeightRows(self.weight, self.first, self.count, self.weight.group)
        kept.put(0, codes, scales, None, fill)

    def _by_group(self, numbers: Tensor) -> Tensor:
        """Repeat what is shared by more inputs than a group of ours has; pad to whole blocks."""
        wanted = self.weight.scales.shape[1]
        if self.group == -1:
            return numbers.expand(len(numbers), wanted)
        if self.group > BLOCK:
            numbers = numbers.repeat_interleave(self.group // BLOCK, 1)[:, :wanted]
        return F.pad(numbers, (0, wanted - numbers.shape[1]))
