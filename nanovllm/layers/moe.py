"""A mixture of experts in place of the MLP: every token runs through a few of many."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.config import ExpertsConfig
from nanovllm.kernels.base import PackedExperts, Routing
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.shards import WeightSlot, shared_slot, split, whole


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections."""

    gate: str
    up: str
    down: str


class Experts(Layer):
    """The projections of all experts, each kind in one tensor; a rank has a share of every one."""

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, names: ExpertNames, build: Build
    ) -> None:
        super().__init__()
        self.hidden, self.size = whole(hidden_size), split(config.size, build.group)
        self.gate_up = build.parameter(config.num_experts, 2 * self.size.count, hidden_size)
        self.down = build.parameter(config.num_experts, hidden_size, self.size.count)
        self.routing = Routing(config.top_k, config.is_normalized)
        self.names = names
        self.ops, self.group = build.ops, build.group
        self._packed: PackedExperts | None = None

    def after(
        self, norm: RMSNorm, x: Tensor | None, residual: Tensor | None, router: Linear
    ) -> tuple[Tensor, Tensor]:
        """Run the experts that the router chooses on the norm of x + residual; see Linear.after."""
        assert self._packed is not None, "after before pack"
        x, residual = self._packed.after_norm(x, residual, norm.weights, router.packed)
        return self.group.all_reduce(x), residual

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            prefix, rows = f"{path}.{i}", [self.size]
            slots[f"{prefix}.{self.names.gate}.weight"] = shared_slot(gate, rows, self.hidden)
            slots[f"{prefix}.{self.names.up}.weight"] = shared_slot(up, rows, self.hidden)
            down_slot = shared_slot(down, [self.hidden], self.size)
            slots[f"{prefix}.{self.names.down}.weight"] = down_slot
        return slots

    def pack(self, has_room: bool) -> None:
        self._packed = self.ops.pack_experts(self.gate_up, self.down, self.routing)
        del self.gate_up, self.down


class SparseMLP(Layer):
    """A router chooses each token's experts; what they give is added up by its weights."""

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, names: ExpertNames, build: Build
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, config.num_experts, False, build, "gate")
        self.experts = Experts(hidden_size, config, names, build)

    def forward(
        self, norm: RMSNorm, x: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.experts.after(norm, x, residual, self.gate)
