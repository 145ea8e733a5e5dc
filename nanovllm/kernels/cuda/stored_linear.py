"""Projections on CUDA whose weights stay quantised as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.cuda.codes_few_rows import codes_few_rows, make_counters
from nanovllm.kernels.cuda.codes_one_row import codes_one_row
from nanovllm.kernels.cuda.codes_widen import widen_codes
from nanovllm.kernels.cuda.linear_fp8 import fp8_after_norm, fp8_many_rows, library_weight
from nanovllm.kernels.ops import Activation, Hidden, NormWeights, Ops
from nanovllm.kernels.stored_weights import Fp8Weight, Int4Weight

# Up to here reading the weight takes the time, and activations are not rounded.
MAX_FP8_ROWS = 64
# Beyond, the weight is widened first: written and read again, nine times the bytes that it has.
MAX_INT4_ROWS = 1024


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One row runs in one fused kernel, a few in another, more in products of the library."""

    ops: Ops
    weight: Fp8Weight | Int4Weight
    library: Fp8Weight | None  # as the library's product of many rows in FP8 takes it
    counters: Tensor  # of `codes_few_rows`
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return codes_one_row(Hidden(x), None, self.weight, self.bias, self.activation)[0]
        x = x.contiguous()
        if self._has_few(len(x)):
            return codes_few_rows(x, self.weight, self.bias, self.activation, self.counters)
        return self._gate(self._multiply_many(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        assert self.activation is None
        if len(x) == 1 or not self._has_few(len(x)):
            return Hidden(residual, self(x))
        y = codes_few_rows(x.contiguous(), self.weight, self.bias, None, None)
        return Hidden(residual, y)

    def after_norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        if len(hidden.residual) == 1:
            return codes_one_row(hidden, norm, self.weight, self.bias, self.activation)
        library, residual = self._library_of(hidden.residual), hidden.residual
        if library is not None and not library.has_blocks and not self._has_few(len(residual)):
            return self._gate(fp8_after_norm(hidden, norm, library, self.bias)), residual
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual

    def _has_few(self, num_rows: int) -> bool:
        most = MAX_FP8_ROWS if isinstance(self.weight, Fp8Weight) else MAX_INT4_ROWS
        return num_rows <= most

    def _library_of(self, x: Tensor) -> Fp8Weight | None:
        return self.library if x.dtype == torch.bfloat16 else None

    def _gate(self, y: Tensor) -> Tensor:
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def _multiply_many(self, x: Tensor) -> Tensor:
        library = self._library_of(x)
        if library is not None:
            return fp8_many_rows(x, library, self.bias)
        return F.linear(x, widen_codes(self.weight, x.dtype), self.bias)


def pack_stored(
    ops: Ops, weight: Fp8Weight | Int4Weight, bias: Tensor | None, activation: Activation | None
) -> StoredLinear:
    library = None
    if isinstance(weight, Fp8Weight) and weight.codes.is_cuda:
        library = library_weight(weight)
    counters = make_counters(weight.words.device)
    return StoredLinear(ops, weight, library, counters, bias, activation)
