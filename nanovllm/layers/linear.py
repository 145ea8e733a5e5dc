"""Projections: one weight, or several checkpoint weights stacked so that one product serves all."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.ops import Activation, Hidden, PackedLinear
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.shards import Share, WeightSlot, shared_slot, whole


class MergedLinear(Layer):
    """Stack a rank's shares of the outputs of `parts`, by checkpoint name: q, k, v or gate, up.

    One name may hold several of them. One with an activation returns activation(gate) * up.
    """

    def __init__(
        self,
        inputs: Share,
        parts: dict[str, list[Share]],
        bias: bool,
        build: Build,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.inputs, self.parts = inputs, parts
        num_out = sum(share.count for shares in parts.values() for share in shares)
        self.weight = build.parameter(num_out, inputs.count)
        self.bias = build.parameter(num_out) if bias else None
        self.ops = build.ops
        self._packed: PackedLinear | None = None

    @property
    def packed(self) -> PackedLinear:
        assert self._packed is not None, "forward before pack"
        return self._packed

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def after_norm(self, hidden: Hidden, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Project the norm of hidden; return also the residual, to which its update is added."""
        return self.packed.after_norm(hidden, norm.weights)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        parent = path.rpartition(".")[0]
        slots, first = {}, 0
        for name, shares in self.parts.items():
            prefix = f"{parent}.{name}" if parent else name
            slots[f"{prefix}.weight"] = shared_slot(self.weight[first:], shares, self.inputs)
            if self.bias is not None:
                slots[f"{prefix}.bias"] = shared_slot(self.bias[first:], shares)
            first += sum(share.count for share in shares)
        return slots

    def pack(self, has_room: bool) -> None:
        """Hand the loaded weight over to the device's layout, which keeps what it needs of it."""
        self._packed = self.ops.pack_linear(self.weight, self.bias, self.activation, has_room)
        del self.weight


class RowParallelLinear(MergedLinear):
    """A projection of what is spread over the ranks; their results are added up."""

    def __init__(
        self, inputs: Share, out_features: int, bias: bool, build: Build, name: str
    ) -> None:
        super().__init__(inputs, {name: [whole(out_features)]}, bias, build)
        self.group = build.group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.packed(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        """Project x, for the next norm to add it to the residual."""
        if self.group.is_alone:
            return self.packed.add_to(residual, x)
        return Hidden(residual, self(x))  # every rank has the residual: their sum must not

    def pack(self, has_room: bool) -> None:
        if self.group.rank > 0:
            self.bias = None  # rank 0 adds it
        super().pack(has_room)
