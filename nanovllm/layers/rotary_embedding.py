"""Rotary position embedding: tables for every position, applied to q and k together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.config import RopeConfig
from nanovllm.layers.build import Layer


class RotaryEmbedding(Layer):
    """Pairs (i, i + head_dim / 2) turn by position * frequency[i]."""

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        rope: RopeConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_position).float(), rope_frequencies(head_dim, rope))
        cos, sin = angles.cos(), angles.sin()
        # Laid out for `rotate`: the half that takes -sin of its partner comes first.
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)  # [positions, head_dim]
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for a batch, each [tokens, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [tokens, heads, head_dim]; rolling by half swaps each pair."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """Return the angle per position of each pair, scaled as the checkpoint was trained."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "factors":
        return frequencies / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)
