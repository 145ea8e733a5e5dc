"""FP8 weights with one float scale for each output, or one for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import Parts, check_matrix, check_part, read_part
from nanovllm.checkpoint.weights import FLOATS, Codes, StoredTensor
from nanovllm.quantisation import CodeLayout, Quantisation


@dataclass(frozen=True, slots=True)
class ScaledFp8:
    codes: StoredTensor  # [outputs, inputs]
    scales: StoredTensor  # [outputs, 1] or [outputs], or of all: [1] or []

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def cuts(self) -> tuple[int, int]:
        return 1, 1

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("fp8", -1)

    def widen(self, rows: slice, columns: slice) -> Tensor:
        part = self.codes_of(rows, columns)
        return part.codes.float().mul_(part.scales)

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        is_single = self.scales.shape in ((), (1,))
        scales = read_part(self.scales) if is_single else read_part(self.scales, rows)
        codes = read_part(self.codes, rows, columns)
        return Codes(codes, scales.float().view(-1, 1).expand(len(codes), 1), None)


def open_fp8_scaled(parts: Parts, quantisation: Quantisation) -> ScaledFp8:
    codes, scales = parts["weight"], parts["weight_scale"]
    num_outputs, _ = check_matrix(codes, torch.float8_e4m3fn)
    known = ((), (1,), (num_outputs,))
    shape = scales.shape if scales.shape in known else (num_outputs, 1)
    check_part(scales, shape, *FLOATS)
    return ScaledFp8(codes, scales)
