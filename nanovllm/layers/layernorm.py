"""RMSNorm after a residual add, and the weights of the one over the heads of q and k."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.base import QKNormWeights
from nanovllm.layers.build import Build, Layer


class RMSNorm(Layer):
    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(dim)
        self.eps = eps
        self.ops = build.ops

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum as the next residual; may overwrite both."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        return {f"{path}.weight": self.weight}


class QKNorm(Layer):
    """Holds what normalises every head of q and k; the rotation applies it on its way."""

    def __init__(self, head_dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.q_weight, self.k_weight = build.parameter(head_dim), build.parameter(head_dim)
        self.weights = QKNormWeights(self.q_weight, self.k_weight, eps)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        parent = path.rpartition(".")[0]
        return {
            f"{parent}.q_norm.weight": self.q_weight,
            f"{parent}.k_norm.weight": self.k_weight,
        }
