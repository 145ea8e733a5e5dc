"""Rotary position embedding: the table of cosines and sines of every position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.config import RopeConfig


def rope_table(head_dim: int, max_position: int, rope: RopeConfig, device: torch.device) -> Tensor:
    """Return the cosines and sines of pairs (i, i + head_dim / 2): [positions, 2, head_dim / 2].

    If queries are scaled by their position, the scaled cosines and sines for q follow:
    [positions, 4, head_dim / 2].
    """
    positions = torch.arange(max_position).float()[:, None]
    rotary_dim = rope.rotary_dim or head_dim
    angles = positions * rope_frequencies(rotary_dim, rope, positions)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    fixed = torch.tensor([[1.0], [0.0]]).expand(max_position, 2, (head_dim - rotary_dim) // 2)
    table = torch.cat((table, fixed), dim=2)
    if rope.q_scaling:
        periods = positions.div(rope.original_max_position, rounding_mode="floor")
        scales = 1 + rope.q_scaling * (1 + periods).log()  # [positions, 1]
        table = torch.cat((table, table * scales[:, :, None]), dim=1)
    return table.to(device)


def rope_order(head_dim: int, rope: RopeConfig) -> list[int] | None:
    """Return a head's dimensions in the order of `rope_table`; None if the order is unchanged.

    q and k may be reordered alike, because this does not change their dot products.
    """
    if rope.rotary_dim is None and not rope.is_interleaved:
        return None
    rotary_dim = rope.rotary_dim or head_dim
    dims, fixed = range(rotary_dim), range(rotary_dim, head_dim)
    half = rotary_dim // 2
    pairs = (dims[::2], dims[1::2]) if rope.is_interleaved else (dims[:half], dims[half:])
    middle = len(fixed) // 2
    return [*pairs[0], *fixed[:middle], *pairs[1], *fixed[middle:]]


def rope_frequencies(head_dim: int, rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return each pair's rotation per position in radians, with the checkpoint's rope scaling."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if rope.kind == "dynamic":
        return 1.0 / _dynamic_base(head_dim, rope, positions) ** exponents
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "factors":
        return frequencies / torch.tensor(rope.factors)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else _yarn(frequencies, rope)


def order_heads(
    dims: list[int], num_heads: int, num_kv_heads: int, has_gates: bool = False
) -> list[int]:
    """Return the row order of the merged q, k and v that puts each q and k head in order `dims`.

    The rows of v stay in place. With `has_gates`, q_proj stores a gate after the q of each head;
    all gates are moved to the front.
    """
    head_dim, q_size = len(dims), len(dims) * (1 + has_gates)
    q = [head * q_size + dim for head in range(num_heads) for dim in dims]
    gates = [head * q_size + dim for head in range(num_heads) for dim in range(head_dim, q_size)]
    first = num_heads * q_size
    k = [first + head * head_dim + dim for head in range(num_kv_heads) for dim in dims]
    first += len(k)
    return [*gates, *q, *k, *range(first, first + len(k))]


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
