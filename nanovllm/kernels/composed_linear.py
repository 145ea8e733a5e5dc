"""A projection with the operations around it run one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.base import LinearFn, NormWeights, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class ComposedLinear:
    ops: Ops
    linear: LinearFn
    is_gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.ops.silu_mul(y) if self.is_gated else y

    def summands(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x)

    def after_norm(
        self,
        x: Tensor | None,
        residual: Tensor | None,
        norm: NormWeights,
        upcoming: PackedLinear | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert x is not None  # this class never leaves it out
        if residual is None:
            return self(self.ops.rms_norm(x, norm.weight, norm.eps)), x
        x, residual = self.ops.add_rms_norm(x, residual, norm.weight, norm.eps)
        return self(x), residual
