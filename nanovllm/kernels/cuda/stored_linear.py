"""Projections on CUDA whose weights stay quantised as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.cuda.codes_one_row import codes_one_row
from nanovllm.kernels.cuda.linear_few_rows import few_rows_linear
from nanovllm.kernels.cuda.linear_fp8 import fp8_many_rows, fp8_widen, library_weight
from nanovllm.kernels.cuda.linear_int4 import int4_few_rows, int4_widen
from nanovllm.kernels.ops import Activation, Hidden, NormWeights, Ops
from nanovllm.kernels.stored_weights import Fp8Weight, Int4Weight

MAX_FP8_ROWS = 64  # up to here reading the weight takes the time, and activations are not rounded
# Beyond, the weight is widened first. Only 64 rows in tiles and 256 widened were ever measured.
MAX_INT4_ROWS = 128
NUM_PROGRAMS, MAX_SPLITS = 256, 4  # that fill a device; parts of the inputs


class Products(Protocol):
    """The products of a kept weight with several rows, by how many there are."""

    @property
    def max_rows(self) -> int:
        """How many rows `few_rows` is for."""

    def few_rows(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, num_splits: int
    ) -> Tensor: ...

    def many_rows(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Fp8Products:
    weight: Fp8Weight
    library: Fp8Weight | None  # as the product of many rows takes it
    max_rows: int = MAX_FP8_ROWS

    def few_rows(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, num_splits: int
    ) -> Tensor:
        codes, scales = self.weight.codes, self.weight.scales
        return few_rows_linear(x, codes, bias, activation, num_splits, scales=scales)

    def many_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.library is not None and x.dtype == torch.bfloat16:
            return fp8_many_rows(x, self.library, bias)
        return F.linear(x, fp8_widen(self.weight, x.dtype), bias)


@dataclass(frozen=True, slots=True)
class Int4Products:
    weight: Int4Weight
    max_rows: int = MAX_INT4_ROWS

    def few_rows(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None, num_splits: int
    ) -> Tensor:
        return int4_few_rows(x, self.weight, bias, activation, num_splits)

    def many_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, int4_widen(self.weight, x.dtype), bias)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One row runs in one fused kernel, a few in another, more in products of the library."""

    ops: Ops
    weight: Fp8Weight | Int4Weight
    products: Products  # of more rows than one
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return codes_one_row(Hidden(x), None, self.weight, self.bias, self.activation)[0]
        if len(x) <= self.products.max_rows:
            return self.products.few_rows(x.contiguous(), self.bias, self.activation, 1)
        y = self.products.many_rows(x.contiguous(), self.bias)
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        assert self.activation is None
        num_splits = self._num_splits(len(x))
        if num_splits == 1:
            return Hidden(residual, self(x))
        return Hidden(residual, self.products.few_rows(x.contiguous(), self.bias, None, num_splits))

    def after_norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        if len(hidden.residual) == 1:
            return codes_one_row(hidden, norm, self.weight, self.bias, self.activation)
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual

    def _num_splits(self, num_rows: int) -> int:
        """Into how many parts to split the inputs to fill the device: a power of two."""
        if not 1 < num_rows <= self.products.max_rows:
            return 1
        num_out, num_in = self.weight.shape
        num_tiles = -(-num_out // 64) * -(-num_rows // 128)
        most = max(1, min(NUM_PROGRAMS // num_tiles, MAX_SPLITS, num_in // 256))
        return 1 << (most.bit_length() - 1)


def pack_stored(
    ops: Ops, weight: Fp8Weight | Int4Weight, bias: Tensor | None, activation: Activation | None
) -> StoredLinear:
    products: Products
    if isinstance(weight, Fp8Weight):
        products = Fp8Products(weight, library_weight(weight) if weight.codes.is_cuda else None)
    else:
        products = Int4Products(weight)
    return StoredLinear(ops, weight, products, bias, activation)
