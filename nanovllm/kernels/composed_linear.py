"""Projections and experts with the operations around them run one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.ops import Activation, LinearFn, NormWeights, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class ComposedLinear:
    ops: Ops
    linear: LinearFn
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.activation is None else self.ops.gate(y, self.activation)

    def summands(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x)

    def after_norm(
        self, x: Tensor | None, residual: Tensor | None, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.norm(x, residual, norm)
        return self(x), residual


@dataclass(frozen=True, slots=True)
class ComposedExperts:
    ops: Ops
    run: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.run(x, logits)

    def after_norm(
        self, x: Tensor | None, residual: Tensor | None, norm: NormWeights, router: PackedLinear
    ) -> tuple[Tensor, Tensor]:
        normed, total = self.ops.norm(x, residual, norm)
        return self.run(normed, router(normed)), total
