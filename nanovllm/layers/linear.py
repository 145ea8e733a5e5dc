"""Projections: one weight, or several checkpoint weights stacked so that one product serves all."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.base import LinearFn
from nanovllm.layers.build import Build, Layer


class MergedLinear(Layer):
    """Stack the outputs of `parts` (checkpoint name -> size): q, k, v or gate, up."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts
        num_out = sum(parts.values())
        self.weight = build.parameter(num_out, in_features)
        self.bias = build.parameter(num_out) if bias else None
        self.ops = build.ops
        self._run: LinearFn | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self._run is not None, "forward before pack"
        return self._run(x)

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
        self._run = self.ops.pack_linear(self.weight, self.bias, has_room)
        del self.weight


class Linear(MergedLinear):
    """A projection under its own checkpoint name."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, build: Build, name: str
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias, build)
