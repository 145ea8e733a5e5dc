"""Projections: one weight, or several checkpoint weights stacked so that one product serves all."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.base import Activation, PackedLinear
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm


class MergedLinear(Layer):
    """Stack the outputs of `parts` (checkpoint name -> size): q, k, v or gate, up.

    One with an activation returns activation(gate) * up.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        build: Build,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.parts = parts
        num_out = sum(parts.values())
        self.weight = build.parameter(num_out, in_features)
        self.bias = build.parameter(num_out) if bias else None
        self.ops = build.ops
        self._packed: PackedLinear | None = None

    @property
    def packed(self) -> PackedLinear:
        assert self._packed is not None, "forward before pack"
        return self._packed

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def before_norm(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Project x to what only `after` takes, together with residual: see PackedLinear."""
        return self.packed.summands(x, residual)

    def after(
        self, norm: RMSNorm, x: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Project the norm of x + residual; return that and the sum as the next residual."""
        return self.packed.after_norm(x, residual, norm.weights)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        parent = path.rpartition(".")[0]
        slots, first = {}, 0
        for name, size in self.parts.items():
            prefix = f"{parent}.{name}" if parent else name
            slots[f"{prefix}.weight"] = self.weight[first : first + size]
            if self.bias is not None:
                slots[f"{prefix}.bias"] = self.bias[first : first + size]
            first += size
        return slots

    def pack(self, has_room: bool) -> None:
        """Hand the loaded weight over to the device's layout, which keeps what it needs of it."""
        self._packed = self.ops.pack_linear(self.weight, self.bias, self.activation, has_room)
        del self.weight


class Linear(MergedLinear):
    """A projection under its own checkpoint name."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, build: Build, name: str
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias, build)
