"""Rotary position embedding: the cosines and sines of every position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.config import RopeConfig


def rope_table(head_dim: int, max_position: int, rope: RopeConfig, device: torch.device) -> Tensor:
    """Return [positions, 2, head_dim / 2]: pairs (i, i + head_dim / 2) turn by these angles."""
    angles = torch.outer(torch.arange(max_position).float(), rope_frequencies(head_dim, rope))
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


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
