"""Ops on CUDA: Triton where it beats the libraries, cuBLAS for products with many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.composed_linear import ComposedLinear
from nanovllm.kernels.cuda import elementwise
from nanovllm.kernels.cuda.experts_codes import run_code_pairs
from nanovllm.kernels.cuda.experts_grouped import ExpertsWeight, run_grouped
from nanovllm.kernels.cuda.experts_pairs import route, run_pairs
from nanovllm.kernels.cuda.linear_few_rows import choose_splits, few_rows_linear, has_few_rows
from nanovllm.kernels.cuda.linear_one_row import one_row_linear
from nanovllm.kernels.cuda.stored_linear import pack_stored
from nanovllm.kernels.ops import (
    Activation,
    Hidden,
    NormWeights,
    PackedExperts,
    PackedLinear,
    Routing,
)
from nanovllm.kernels.stored_weights import StoredWeight
from nanovllm.kernels.torch_ops import TorchOps

ADD_ROWS = 1024  # from here on a product adds the residual itself, which saves the norm a pass
MAX_PAIR_TOKENS = 4  # with more, so many share an expert that sorting them pays


class TritonOps:
    launcher = blocks = None
    embed = staticmethod(TorchOps.embed)
    rope_write = staticmethod(elementwise.rope_write)
    gate = staticmethod(elementwise.gate)

    def norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        return elementwise.rms_norm(hidden, norm), hidden.residual

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        weight = weight.contiguous()
        if weight.dtype == torch.float32:
            return ComposedLinear(self, lambda x: F.linear(x, weight, bias), activation)
        return CudaLinear(self, weight, bias, activation)

    def pack_codes(
        self,
        weight: StoredWeight,
        bias: Tensor | None,
        activation: Activation | None,
    ) -> PackedLinear:
        return pack_stored(self, weight, bias, activation)

    def pack_experts(self, gate_up: Tensor, down: Tensor, routing: Routing) -> PackedExperts:
        return CudaExperts(self, gate_up.contiguous(), down.contiguous(), routing)

    def pack_code_experts(
        self, gate_up: StoredWeight, down: StoredWeight, routing: Routing
    ) -> PackedExperts:
        return CudaExperts(self, gate_up, down, routing)


@dataclass(slots=True)
class CudaLinear:
    """One row runs in one fused kernel, a few in another, more through cuBLAS."""

    ops: TritonOps
    weight: Tensor
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return one_row_linear(Hidden(x), None, self.weight, self.bias, self.activation)[0]
        if has_few_rows(len(x), self.weight):
            return few_rows_linear(x, self.weight, self.bias, self.activation)
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        assert self.activation is None
        if len(x) >= ADD_ROWS and self.bias is None:
            return Hidden(residual.addmm_(x, self.weight.t()))
        num_splits = choose_splits(len(x), self.weight)
        if num_splits == 1:
            return Hidden(residual, self(x))
        return Hidden(residual, few_rows_linear(x, self.weight, self.bias, None, num_splits))

    def after_norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        if len(hidden.residual) == 1:
            return one_row_linear(hidden, norm, self.weight, self.bias, self.activation)
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """Tokens read their experts each for itself while they are few, together when they are more."""

    ops: TritonOps
    gate_up: ExpertsWeight
    down: ExpertsWeight
    routing: Routing

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        if len(x) == 0:
            return x
        if len(x) > MAX_PAIR_TOKENS:
            return run_grouped(x, logits, self.gate_up, self.down, self.routing)
        ids, weights, _ = route(logits, self.routing)
        return self.run_pairs(x, ids, weights)

    def after_norm(
        self, hidden: Hidden, norm: NormWeights, router: PackedLinear
    ) -> tuple[Tensor, Tensor]:
        if len(hidden.residual) == 1 and isinstance(router, CudaLinear):
            logits, residual = router.after_norm(hidden, norm)
            normed = torch.empty_like(residual)
            ids, weights, _ = route(logits, self.routing, x=residual, norm=norm, normed=normed)
            return self.run_pairs(normed, ids, weights), residual
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed, router(normed)), residual

    def run_pairs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of each token, which it reads for itself."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return run_pairs(x, ids, weights, gate_up, down)
        assert not isinstance(gate_up, Tensor)
        assert not isinstance(down, Tensor)
        return run_code_pairs(x, ids, weights, gate_up, down)
