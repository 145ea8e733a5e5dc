"""A mixture of experts in place of the MLP: every token runs through a few of many."""

from __future__ import annotations

from nanovllm.config import ExpertsConfig
from nanovllm.kernels.ops import Hidden, PackedExperts, Routing
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.shards import ExpectedTensor, split, whole
from nanovllm.layers.weight_format import ExpertNames


class SparseMLP(Layer):
    """A router chooses each token's experts; what they give is added up by its weights.

    A rank has a share of every expert.
    """

    packed: PackedExperts  # once it is loaded

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, names: ExpertNames, build: Build
    ) -> None:
        super().__init__()
        hidden, size = whole(hidden_size), split(config.size, build.group)
        self.gate = MergedLinear(hidden, {"gate": [whole(config.num_experts)]}, False, build)
        self.weight = build.weight_format.experts(config.num_experts, names, hidden, size, build)
        self.routing = Routing(config.top_k, config.is_normalized)
        self.ops, self.group = build.ops, build.group

    def forward(self, hidden: Hidden, norm: RMSNorm) -> Hidden:
        y, residual = self.packed.after_norm(hidden, norm.weights, self.gate.packed)
        return Hidden(residual, self.group.all_reduce(y))

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return self.weight.expected_tensors(f"{path}.")

    def pack(self, has_room: bool) -> None:
        self.packed = self.weight.pack(self.ops, self.routing)
        del self.weight
