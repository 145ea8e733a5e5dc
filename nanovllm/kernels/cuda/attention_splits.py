"""Softmax over a part of the keys: what a program keeps of its part, and how parts are joined.

A part of a line (a query of one head) is the sum of its weighted values, the largest score, which
the weights are relative to, and the sum of the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SPLITS = 32


def partial_size(num_queries: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Floats that the parts of all lines take; what is not split needs none."""
    return 0 if num_splits == 1 else num_queries * num_heads * num_splits * (head_dim + 2)


def power_of_two_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


@triton.jit
def split_size(  # type: ignore[no-untyped-def]
    num_keys, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Keys per split, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), TILE) * TILE, MIN_SPLIT)


@triton.jit
def store_part(  # type: ignore[no-untyped-def]
    partial, places, num_places, dims, acc, line_max, line_sum, is_line, HEAD_DIM: tl.constexpr
):
    is_real = is_line[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_real)
    tl.store(partial + num_places * HEAD_DIM + places, line_max, mask=is_line)
    tl.store(partial + num_places * (HEAD_DIM + 1) + places, line_sum, mask=is_line)


@triton.jit
def load_part(partial, places, num_places, dims, is_used, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the parts at some places; what is not used is a part without keys."""
    is_real = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :], mask=is_real, other=0.0)
    maxima = partial + num_places * HEAD_DIM + places
    line_max = tl.load(maxima, mask=is_used, other=float("-inf"))
    return acc, line_max, tl.load(maxima + num_places, mask=is_used, other=0.0)


@triton.jit
def join_parts(acc, maxima, sums):  # type: ignore[no-untyped-def]
    """Return the weighted mean of a line's values, from all its parts; without keys zeros."""
    highest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(sums * weights, 0)
    return tl.sum(acc * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
