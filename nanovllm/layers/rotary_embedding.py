"""Rotary position embedding: the table of cosines and sines of every position."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import RopeConfig
from nanovllm.layers.scaled_frequencies import scaled_frequencies


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
    if rope.kind != "default":
        return scaled_frequencies(head_dim, rope, positions)
    return 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


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
