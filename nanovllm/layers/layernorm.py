"""The weights of RMSNorms; the projections behind them apply them."""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels.base import NormWeights, QKNormWeights
from nanovllm.layers.build import Build, Layer


class RMSNorm(Layer):
    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(dim)
        self.weights = NormWeights(self.weight, eps)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        return {f"{path}.weight": self.weight}


class QKNorm(Layer):
    """Normalises every head of q and k, on their way through the rotation."""

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
