"""Projections and experts with the operations around them run one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.ops import Activation, Hidden, LinearFn, NormWeights, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class ComposedLinear:
    ops: Ops
    linear: LinearFn
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> Hidden:
        return Hidden(residual, self(x))

    def after_norm(self, hidden: Hidden, norm: NormWeights) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual


@dataclass(frozen=True, slots=True)
class ComposedExperts:
    ops: Ops
    run: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.run(x, logits)

    def after_norm(
        self, hidden: Hidden, norm: NormWeights, router: PackedLinear
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.norm(hidden, norm)
        return self.run(normed, router(normed)), residual
