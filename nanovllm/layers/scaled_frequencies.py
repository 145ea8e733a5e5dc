"""Rotations per position of models whose rope scaling extends the trained context length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.config import RopeConfig


def scaled_frequencies(head_dim: int, rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return what `rope_frequencies` returns if the checkpoint has any kind of rope scaling."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if rope.kind == "dynamic":
        return 1.0 / _dynamic_base(head_dim, rope, positions) ** exponents
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "factors":
        return frequencies / torch.tensor(rope.factors)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else _yarn(frequencies, rope)


def _dynamic_base(head_dim: int, rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the rope base of each position; it grows beyond the trained context length.

    It depends only on the position, not on the final length, so a cached key never changes.
    """
    lengths = (positions + 1).clamp(min=rope.original_max_position)
    growth = rope.factor * lengths / rope.original_max_position - (rope.factor - 1)
    return rope.theta * growth ** (head_dim / (head_dim - 2))


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend those in between."""
    # Number of full rotations within the trained context length.
    rotations = rope.original_max_position * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, as in `_llama3`, but blend by frequency index."""
    num_frequencies = len(frequencies)
    first, last = (
        num_frequencies
        * math.log(rope.original_max_position / (rotations * 2 * math.pi))
        / math.log(rope.theta)
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    index = torch.arange(num_frequencies).float()
    blend = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - blend + blend / rope.factor)
