"""Projections without fusion: a norm, a GEMM and an activation, one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.ops.interface import Activation, LinearFn, NormWeights, Ops, ResidualStream


@dataclass(frozen=True, slots=True)
class ComposedLinear:
    """A projection whose norm and activation run separately from `linear`, its GEMM."""

    ops: Ops
    linear: LinearFn
    activation: Activation | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.activation is None else self.ops.act_and_mul(y, self.activation)

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        return ResidualStream(residual, self(x))

    def after_norm(self, hidden: ResidualStream, norm: NormWeights) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.norm(hidden, norm)
        return self(normed), residual


def upcast(*tensors: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)
