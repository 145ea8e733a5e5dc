"""MoE on the CPU: with few tokens, our kernels read the weights of each chosen expert once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cpu.gguf_weights import Pairs
from nanovllm.devices.cpu.kernels import experts
from nanovllm.ops.interface import PackedExperts, Routing
from nanovllm.ops.quantized_weight import PanelWeight, Weight
from nanovllm.ops.torch_experts import ComposedExperts, compose_experts, run_each_expert
from nanovllm.ops.torch_linear import linear

if TYPE_CHECKING:
    from nanovllm.devices.cpu.ops import NumbaOps


def pack_experts(ops: NumbaOps, gate_up: Weight, down: Weight, routing: Routing) -> PackedExperts:
    if isinstance(gate_up, PanelWeight) and isinstance(down, PanelWeight):
        num_experts = gate_up.num_experts
        ops.blocks.compile(gate_up, down)
    elif isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        gate_up, down, num_experts = gate_up.contiguous(), down.contiguous(), len(down)
    else:
        return compose_experts(ops, gate_up, down, routing)
    max_tokens = max(ops.max_expert_rows * num_experts // routing.top_k, ops.max_linear_rows)
    run = NumbaExperts(ops, gate_up, down, routing, num_experts, max_tokens)
    return ComposedExperts(ops, run)


@dataclass(frozen=True, slots=True)
class NumbaExperts:
    """An MoE layer: runs our kernels for up to `max_tokens` tokens, otherwise torch GEMMs."""

    ops: NumbaOps
    gate_up: Tensor | PanelWeight  # as in Ops.pack_experts
    down: Tensor | PanelWeight
    routing: Routing
    num_experts: int
    max_tokens: int

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        launcher, routing = self.ops.launcher, self.routing
        if len(x) > self.max_tokens:
            dtype = self.ops.matmul_dtype
            return run_each_expert(x, logits, self.num_experts, routing, self._run_expert, dtype)
        num_tokens, hidden = x.shape
        pairs, weights = self._route(logits.contiguous())
        y = self._multiply(x.contiguous(), self.gate_up, pairs)
        y = self._multiply(self.ops.act_and_mul(y, "silu"), self.down, pairs)
        out = launcher.empty(num_tokens, hidden)
        launcher.launch(experts.add_choices, out, y, weights, num_tokens, routing.top_k, hidden)
        return out

    def _route(self, logits: Tensor) -> tuple[Pairs, Tensor]:
        """Return the pairs sorted by expert, and their routing weights sorted by token."""
        launcher, top_k = self.ops.launcher, self.routing.top_k
        num_tokens, num_experts = logits.shape
        num_pairs = num_tokens * top_k
        ids, order = (launcher.empty(num_pairs, dtype=torch.int32) for _ in range(2))
        starts = launcher.empty(num_experts + 1, dtype=torch.int32)
        weights = launcher.empty(num_pairs, dtype=torch.float32)
        sizes = num_tokens, num_experts, top_k
        launcher.launch(experts.route, ids, weights, logits, *sizes, self.routing.is_normalized)
        launcher.launch(experts.sort_pairs, order, starts, ids, num_pairs, num_experts)
        return Pairs(order, starts, num_tokens), weights

    def _multiply(self, x: Tensor, weight: Tensor | PanelWeight, pairs: Pairs) -> Tensor:
        """Multiply each pair's row of x (one row per token or per pair) by its expert's weight."""
        if isinstance(weight, PanelWeight):
            return self.ops.blocks.multiply_pairs(x, weight, pairs)
        launcher, max_rows = self.ops.launcher, pairs.max_rows
        num_experts, num_out, num_in = weight.shape
        num_pairs = len(pairs.order)
        y = launcher.empty(num_pairs, num_out)
        scratch = launcher.scratch(launcher.num_threads * (max_rows * num_in + experts.EXPERT_TILE))
        tensors = y, x, weight, pairs.order, pairs.starts, scratch
        sizes = max_rows, num_experts, num_pairs // max(len(x), 1), num_out, num_in
        launcher.launch(experts.grouped_linear, *tensors, *sizes)
        return y

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self._multiply_many(x, self.gate_up, expert).chunk(2, dim=-1)
        return self._multiply_many(F.silu(gate) * up, self.down, expert)

    def _multiply_many(self, x: Tensor, weight: Tensor | PanelWeight, expert: int) -> Tensor:
        if isinstance(weight, PanelWeight):
            return self.ops.blocks.multiply_many(x, weight.of_expert(expert))
        return linear(x, weight[expert], None, self.ops.matmul_dtype)
