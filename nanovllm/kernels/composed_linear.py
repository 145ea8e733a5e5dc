"""A projection with the operations around it run one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.base import Activation, LinearFn, NormWeights, Ops, PackedLinear


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
        self,
        x: Tensor | None,
        residual: Tensor | None,
        norm: NormWeights,
        upcoming: PackedLinear | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.norm(x, residual, norm)
        return self(x), residual
