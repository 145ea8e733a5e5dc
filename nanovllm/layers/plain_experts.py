"""Experts in the plain weight format: two tensors for all of a layer, in the model's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nanovllm.kernels.ops import Ops, PackedExperts, Routing
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares, expect_stack

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.weight_format import ExpertNames


class PlainExperts(nn.Module):
    def __init__(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> None:
        super().__init__()
        self.names, self.hidden, self.size = names, hidden, size
        self.gate_up = build.parameter(num_experts, 2 * size.count, hidden.count)
        self.down = build.parameter(num_experts, hidden.count, size.count)

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        names = self.names
        tensors: dict[str, ExpectedTensor] = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            outputs = {f"experts.{i}.{name}": [self.size] for name in (names.gate, names.up)}
            tensors |= expect_stack(gate_up, outputs, self.hidden)
            tensors[f"experts.{i}.{names.down}"] = expect_shares(down, [self.hidden], self.size)
        return {f"{parent}{name}.weight": tensor for name, tensor in tensors.items()}

    def pack(self, ops: Ops, routing: Routing) -> PackedExperts:
        return ops.pack_experts(self.gate_up, self.down, routing)
