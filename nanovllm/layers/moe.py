"""A mixture of experts in place of the MLP: every token runs through a few of many."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import ExpertsConfig
from nanovllm.kernels.ops import Hidden, PackedExperts, Routing
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.shards import WeightSlot, shared_slot, split, whole


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections."""

    gate: str
    up: str
    down: str


class SparseMLP(Layer):
    """A router chooses each token's experts; what they give is added up by its weights.

    The projections of all experts are one tensor for each kind; a rank has a share of every one.
    """

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, names: ExpertNames, build: Build
    ) -> None:
        super().__init__()
        self.hidden, self.size = whole(hidden_size), split(config.size, build.group)
        self.gate = MergedLinear(self.hidden, {"gate": [whole(config.num_experts)]}, False, build)
        self.gate_up = build.parameter(config.num_experts, 2 * self.size.count, hidden_size)
        self.down = build.parameter(config.num_experts, hidden_size, self.size.count)
        self.routing = Routing(config.top_k, config.is_normalized)
        self.names = names
        self.ops, self.group = build.ops, build.group
        self._packed: PackedExperts | None = None

    def forward(self, hidden: Hidden, norm: RMSNorm) -> Hidden:
        assert self._packed is not None, "forward before pack"
        y, residual = self._packed.after_norm(hidden, norm.weights, self.gate.packed)
        return Hidden(residual, self.group.all_reduce(y))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots, rows = {}, [self.size]
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            prefix = f"{path}.experts.{i}"
            slots[f"{prefix}.{self.names.gate}.weight"] = shared_slot(gate, rows, self.hidden)
            slots[f"{prefix}.{self.names.up}.weight"] = shared_slot(up, rows, self.hidden)
            down_slot = shared_slot(down, [self.hidden], self.size)
            slots[f"{prefix}.{self.names.down}.weight"] = down_slot
        return slots

    def pack(self, has_room: bool) -> None:
        self._packed = self.ops.pack_experts(self.gate_up, self.down, self.routing)
        del self.gate_up, self.down
