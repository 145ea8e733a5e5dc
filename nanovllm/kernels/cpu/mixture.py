"""Experts on the CPU: few tokens run in kernels that read each chosen expert once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nanovllm.kernels.composed_linear import ComposedExperts
from nanovllm.kernels.cpu import kernels
from nanovllm.kernels.cpu.experts import EXPERT_TILE
from nanovllm.kernels.ops import PackedExperts, Routing
from nanovllm.kernels.torch_ops import run_each_expert, run_expert

if TYPE_CHECKING:
    from nanovllm.kernels.cpu.ops import NumbaOps


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tokens with each of their experts, sorted by expert."""

    order: Tensor  # int32: token * top_k + choice
    starts: Tensor  # int32: of each expert, and the end
    max_rows: int  # of an expert


class Mixture(Protocol):
    """The weights of a layer's experts, in some format."""

    num_experts: int

    def gate_up(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Multiply the row of each pair's token with its expert's gate, then up."""

    def down(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Multiply the row of each pair with its expert's down."""

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """Run many rows through one expert."""


def compose_experts(ops: NumbaOps, mixture: Mixture, routing: Routing) -> PackedExperts:
    ops.launcher.compile_experts()
    most = ops.max_expert_rows * mixture.num_experts // routing.top_k
    return ComposedExperts(ops, NumbaExperts(ops, mixture, routing, max(most, ops.max_linear_rows)))


@dataclass(frozen=True, slots=True)
class NumbaExperts:
    """More than max_tokens run expert by expert, in torch's products."""

    ops: NumbaOps
    mixture: Mixture
    routing: Routing
    max_tokens: int

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        mixture, launcher = self.mixture, self.ops.launcher
        if len(x) > self.max_tokens:
            run, dtype = mixture.run_expert, self.ops.product_dtype
            return run_each_expert(x, logits, mixture.num_experts, self.routing, run, dtype)
        num_tokens, hidden = x.shape
        pairs, weights = self._route(logits.contiguous())
        y = mixture.gate_up(x.contiguous(), pairs)
        y = mixture.down(self.ops.gate(y, "silu"), pairs)
        out = launcher.empty(num_tokens, hidden)
        addresses = out.data_ptr(), y.data_ptr(), weights.data_ptr()
        launcher.launch(kernels.ADD_CHOICES, *addresses, num_tokens, self.routing.top_k, hidden)
        return out

    def _route(self, logits: Tensor) -> tuple[Pairs, Tensor]:
        """Return the pairs, and the weights that they have in their tokens' sums."""
        launcher, top_k = self.ops.launcher, self.routing.top_k
        num_tokens, num_experts = logits.shape
        num_pairs = num_tokens * top_k
        ids, order = (launcher.empty(num_pairs, dtype=torch.int32) for _ in range(2))
        starts = launcher.empty(num_experts + 1, dtype=torch.int32)
        weights = launcher.empty(num_pairs, dtype=torch.float32)
        addresses = ids.data_ptr(), weights.data_ptr(), logits.data_ptr()
        sizes = num_tokens, num_experts, top_k
        launcher.launch(kernels.ROUTE, *addresses, *sizes, self.routing.is_normalized)
        addresses = order.data_ptr(), starts.data_ptr(), ids.data_ptr()
        launcher.launch(kernels.GROUP, *addresses, num_pairs, num_experts)
        return Pairs(order, starts, num_tokens), weights


class PlainMixture:
    """Experts in the model's dtype, as Ops.pack_experts takes them."""

    def __init__(self, ops: NumbaOps, gate_up: Tensor, down: Tensor) -> None:
        self.num_experts, self._ops = len(down), ops
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()

    def gate_up(self, x: Tensor, pairs: Pairs) -> Tensor:
        return self._multiply(x, self._gate_up, pairs)

    def down(self, x: Tensor, pairs: Pairs) -> Tensor:
        return self._multiply(x, self._down, pairs)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        weights = self._gate_up[expert], self._down[expert]
        return run_expert(x, *weights, self._ops.product_dtype)

    def _multiply(self, x: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        launcher, max_rows = self._ops.launcher, pairs.max_rows
        num_experts, num_out, num_in = weight.shape
        num_pairs = len(pairs.order)
        y = launcher.empty(num_pairs, num_out)
        scratch = launcher.scratch(launcher.num_threads * (max_rows * num_in + EXPERT_TILE))
        tensors = y, x, weight, pairs.order, pairs.starts, scratch
        addresses = [tensor.data_ptr() for tensor in tensors]
        sizes = max_rows, num_experts, num_pairs // max(len(x), 1), num_out, num_in
        launcher.launch(kernels.GROUPED_LINEAR, *addresses, *sizes)
        return y
