"""RMSNorm, alone, with a residual add, or over the heads of q and k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.build import Build


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum as the next residual."""
        residual = residual + x
        return self(residual), residual

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        return {f"{path}.weight": self.weight}


class QKNorm(nn.Module):
    """Normalise every head of q and k, stacked as [tokens, q heads + kv heads, head_dim]."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, build: Build
    ) -> None:
        super().__init__()
        self.weight = build.parameter(2, head_dim)
        self.num_heads, self.num_kv_heads, self.eps = num_heads, num_kv_heads, eps

    def forward(self, qk: Tensor) -> Tensor:
        q_weight, k_weight = self.weight
        q = F.rms_norm(qk[:, : self.num_heads], q_weight.shape, q_weight, self.eps)
        k = F.rms_norm(qk[:, self.num_heads :], k_weight.shape, k_weight, self.eps)
        return torch.cat((q, k), dim=1)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        parent = path.rpartition(".")[0]
        return {
            f"{parent}.q_norm.weight": self.weight[0],
            f"{parent}.k_norm.weight": self.weight[1],
        }
