"""Rotary position embedding: the table of cosines and sines of every position."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import RopeConfig
from nanovllm.layers.scaled_rope import scaled_frequencies


def rope_table(head_dim: int, max_position: int, rope: RopeConfig, device: torch.device) -> Tensor:
    """Return the cosines and sines of pairs (i, i + head_dim / 2): [positions, 2, head_dim / 2]."""
    positions = torch.arange(max_position).float()[:, None]
    angles = positions * rope_frequencies(head_dim, rope, positions)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    return table.to(device)


def rope_frequencies(head_dim: int, rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return each pair's rotation per position in radians, with the checkpoint's rope scaling."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if rope.kind != "default":
        return scaled_frequencies(exponents, rope, positions)
    return 1.0 / rope.theta**exponents
