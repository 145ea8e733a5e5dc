"""Mixture of experts in plain torch: the reference for kernels, and the fallback without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.composed_linear import upcast
from nanovllm.ops.interface import (
    NormWeights,
    Ops,
    PackedLinear,
    ResidualStream,
    Routing,
    SharedExpert,
)
from nanovllm.ops.quantized_weight import QuantizedWeight, Weight
from nanovllm.ops.torch_linear import linear


@dataclass(frozen=True, slots=True)
class ComposedExperts:
    """Experts without fusion: the norm, the router and the experts run one after another."""

    ops: Ops
    run: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, logits: Tensor, shared: SharedExpert | None = None) -> Tensor:
        y = self.run(x, logits)
        return y if shared is None else shared.add(self.ops, x, y)

    def after_norm(
        self,
        hidden: ResidualStream,
        norm: NormWeights,
        router: PackedLinear,
        shared: SharedExpert | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed, router(normed), shared), residual


def compose_experts(
    ops: Ops,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    matmul_dtype: torch.dtype | None = None,
) -> ComposedExperts:
    """Return the reference experts; each chosen expert runs once, over all its tokens."""

    def run(x: Tensor, logits: Tensor) -> Tensor:
        num_experts = logits.shape[1]

        def run_one(expert: int, rows: Tensor) -> Tensor:
            own_gate_up, own_down = (
                _of_expert(weight, expert, num_experts, x.dtype) for weight in (gate_up, down)
            )
            return run_expert(rows, own_gate_up, own_down, matmul_dtype)

        return run_each_expert(x, logits, num_experts, routing, run_one, matmul_dtype)

    return ComposedExperts(ops, run)


def _of_expert(weight: Weight, expert: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[expert]
    assert isinstance(weight, QuantizedWeight)
    size = weight.shape[0] // num_experts
    return weight[expert * size : (expert + 1) * size].dequantize(dtype)


def run_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, matmul_dtype: torch.dtype | None
) -> Tensor:
    gate, up = linear(x, gate_up, None, matmul_dtype).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down, None, matmul_dtype)


def run_each_expert(
    x: Tensor,
    logits: Tensor,
    num_experts: int,
    routing: Routing,
    run: Callable[[int, Tensor], Tensor],
    matmul_dtype: torch.dtype | None,
) -> Tensor:
    """Run each expert over all its tokens, and return each token's weighted sum of outputs."""
    ids, weights = route(logits, routing)  # [tokens, top_k]
    order = ids.flatten().argsort(stable=True)  # pairs (token, choice), sorted by expert
    counts = ids.flatten().bincount(minlength=num_experts).tolist()
    y = x.new_empty(len(order), x.shape[1])
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs) > 0:
            y[pairs] = run(expert, x[pairs // routing.top_k])
    y = y.view(*ids.shape, x.shape[1])
    weights, y = upcast(weights.unsqueeze(1), y, dtype=matmul_dtype)
    return torch.bmm(weights, y).squeeze(1).to(x.dtype)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the ids of each token's experts, best first, and their weights."""
    # Unlike topk, a stable sort defines which of two equal logits comes first.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = logits.float().softmax(-1).gather(1, ids)
    if routing.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.to(logits.dtype)
