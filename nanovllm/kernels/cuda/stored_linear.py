"""Projections on CUDA whose weights stay quantised as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.cuda.codes_few_rows import codes_few_rows, make_counters
from nanovllm.kernels.cuda.codes_one_row import codes_one_row
from nanovllm.kernels.cuda.codes_widen import widen_codes
from nanovllm.kernels.cuda.linear_fp8 import (
    LibraryWeight,
    fp8_add_to,
    fp8_after_norm,
    fp8_many_rows,
    library_weight,
)
from nanovllm.kernels.ops import Activation, Hidden, NormWeights, Ops
from nanovllm.kernels.stored_weights import Fp8Weight, StoredWeight

# Up to here activations are not rounded for FP8 by output, which would gain little.
MAX_EXACT_ROWS = 16
# Up to here they are not for FP8 by block, and codes that meet such activations are widened in
# registers.
MAX_FP8_ROWS = 64
# Beyond, the weight is widened first: written and read again, nine times the bytes that it has.
MAX_INT4_ROWS = 1024


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One row runs in one fused kernel, a few in another, more in products of the library."""

    ops: Ops
    weight: StoredWeight
    library: LibraryWeight | None  # for products of many rows in FP8
    counters: Tensor  # of `codes_few_rows`
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return codes_one_row(Hidden(x), None, self.weight, self.bias, self.activation)[0]
        x = x.contiguous()
        if (library := self._library_of(x)) is not None:
            return fp8_many_rows(x, library, self.bias, self.activation)
        if self._has_few(len(x)):
            return codes_few_rows(x, self.weight, self.bias, self.activation, self.counters)
        y = F.linear(x, widen_codes(self.weight, x.dtype), self.bias)
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        assert self.activation is None
        x = x.contiguous()
        if (library := self._library_of(x)) is not None:
            return fp8_add_to(residual, x, library, self.bias)
        if len(x) == 1 or not self._has_few(len(x)):
            return Hidden(residual, self(x))
        return Hidden(residual, codes_few_rows(x, self.weight, self.bias, None, None))

    def after_norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        residual = hidden.residual
        if len(residual) == 1:
            return codes_one_row(hidden, norm, self.weight, self.bias, self.activation)
        library = self._library_of(residual)
        if library is not None and not library.stored.has_blocks:
            return fp8_after_norm(hidden, norm, library, self.bias, self.activation), residual
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual

    def _has_few(self, num_rows: int) -> bool:
        most = MAX_FP8_ROWS if isinstance(self.weight, Fp8Weight) else MAX_INT4_ROWS
        return num_rows <= most

    def _library_of(self, x: Tensor) -> LibraryWeight | None:
        """The weight for rows that are to be rounded, if these are."""
        if self.library is None or x.dtype != torch.bfloat16:
            return None
        most = MAX_FP8_ROWS if self.library.stored.has_blocks else MAX_EXACT_ROWS
        return self.library if len(x) > most else None


def pack_stored(
    ops: Ops, weight: StoredWeight, bias: Tensor | None, activation: Activation | None
) -> StoredLinear:
    library = None
    if isinstance(weight, Fp8Weight) and weight.codes.is_cuda:
        library = library_weight(weight)
    counters = make_counters(weight.words.device)
    return StoredLinear(ops, weight, library, counters, bias, activation)
