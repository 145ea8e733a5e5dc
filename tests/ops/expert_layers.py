"""Expert layers to compare kernels on: shapes that do not fill a tile, and uneven routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanovllm.ops.interface import Routing


@dataclass(frozen=True, slots=True)
class Layer:
    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    size: int
    is_normalized: bool = True
    choices: Literal["random", "one hot", "few used", "all equal"] = "random"

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k, self.is_normalized)

    def weights(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """gate_up and down."""
        gate_up = _make(self.num_experts, 2 * self.size, self.hidden) / self.hidden**0.5
        down = _make(self.num_experts, self.hidden, self.size) / self.size**0.5
        return gate_up.to(device, dtype), down.to(device, dtype)

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """x and logits."""
        x = _make(self.num_tokens, self.hidden)
        logits = _make(self.num_tokens, self.num_experts)
        if self.choices == "one hot":
            logits[:, self.num_experts // 2] += 100
        elif self.choices == "few used":
            logits[:, self.top_k :] -= 100
        elif self.choices == "all equal":
            logits[:] = 1.5
        return x.to(device, dtype), logits.to(device, dtype)


LAYERS = [
    Layer(0, 6, 2, 40, 24),
    Layer(1, 6, 1, 40, 24),
    Layer(1, 60, 8, 70, 33, is_normalized=False),
    Layer(3, 8, 2, 1, 1),
    Layer(4, 60, 8, 64, 48),
    Layer(7, 6, 6, 33, 31, is_normalized=False),
    Layer(9, 16, 4, 96, 40, choices="all equal"),
    Layer(17, 8, 2, 72, 20, choices="one hot"),
    Layer(20, 12, 4, 48, 17, is_normalized=False, choices="few used"),
    Layer(40, 6, 2, 34, 20),
    Layer(40, 7, 1, 40, 36, is_normalized=False, choices="one hot"),
]


def _make(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
