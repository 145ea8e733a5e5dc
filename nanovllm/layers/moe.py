"""A mixture of experts (MoE) in place of the MLP: each token runs through a few of many experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.layer_weight import LayerWeight
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.shards import ExpectedTensor, replicated, sharded
from nanovllm.ops.interface import PackedExperts, ResidualStream, Routing, SharedExpert


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A checkpoint's names for the projections of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def build_mlp(
    config: ModelConfig, layer_index: int, build: BuildContext
) -> GatedMLP | SparseMoeBlock:
    """Build the MLP of a layer, or the experts in place of it."""
    if config.experts is None or layer_index in config.experts.dense_layers:
        return GatedMLP(config, build)
    return SparseMoeBlock(config, build, ExpertNames())


class SparseMoeBlock(Layer):
    """A mixture of experts: a router chooses each token's experts and weights their outputs.

    A shared expert, if any, is weighted by the sigmoid of a gate, which has one output per token.
    Every rank has a shard of every expert.
    """

    packed: PackedExperts  # set by `process_weights_after_loading`

    def __init__(self, config: ModelConfig, build: BuildContext, names: ExpertNames) -> None:
        super().__init__()
        assert config.experts is not None
        sizes = config.experts
        hidden, size = replicated(config.hidden_size), sharded(sizes.size, build.group)
        self.gate = MergedLinear(hidden, {"gate": [replicated(sizes.num_experts)]}, False, build)
        experts = [f"experts.{i}." for i in range(sizes.num_experts)]
        gate_up = {f"{e}{name}": [size] for e in experts for name in (names.gate, names.up)}
        self.gate_up = LayerWeight(gate_up, hidden, build, is_uniform=True)
        down = {f"{e}{names.down}": [hidden] for e in experts}
        self.down = LayerWeight(down, size, build, is_uniform=True)
        self.num_experts = sizes.num_experts
        self.routing = Routing(sizes.top_k, sizes.is_normalized)
        self.ops, self.group = build.ops, build.group
        self.shared_expert: GatedMLP | None = None
        if sizes.shared_size:
            shared = replace(config, intermediate_size=sizes.shared_size)
            self.shared_expert = GatedMLP(shared, build)
            gate = {"shared_expert_gate": [replicated(1)]}
            self.shared_expert_gate = MergedLinear(hidden, gate, False, build)

    def forward(self, hidden: ResidualStream, norm: RMSNorm) -> ResidualStream:
        router = self.gate.packed
        y, residual = self.packed.after_norm(hidden, norm.weights, router, self.shared())
        return ResidualStream(residual, self.group.all_reduce(y))

    def shared(self) -> SharedExpert | None:
        """Return the expert that every token runs through, if the layer has one."""
        if self.shared_expert is None:
            return None
        # `down_proj.packed` is the GEMM without `down_proj`'s all-reduce: `forward` sums once.
        return SharedExpert(
            self.shared_expert.gate_up_proj.packed,
            self.shared_expert.down_proj.packed,
            self.shared_expert_gate.packed,
        )

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        weights = self.gate_up, self.down
        tensors = [weight.expected_tensors(f"{path}.") for weight in weights]
        # Kernels need both weights dense, or both quantized.
        if self.gate_up.is_dense != self.down.is_dense:
            for weight in weights:
                weight.use_dense()
            tensors = [weight.expected_tensors(f"{path}.") for weight in weights]
        return tensors[0] | tensors[1]

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        gate_up, down = (w.for_ops(self.num_experts) for w in (self.gate_up, self.down))
        self.packed = self.ops.pack_experts(gate_up, down, self.routing)
        del self.gate_up, self.down
