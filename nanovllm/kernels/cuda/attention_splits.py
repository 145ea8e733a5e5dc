"""Softmax over a part of the keys: which part a program has, what it keeps, how parts are joined.

A part of a row (one query of one head) is the sum of its weighted values, the largest score, which
the weights are relative to, and the sum of the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor]  # sums of values [parts, head_dim], maxima, sums of weights


def allocate_parts(q: Tensor, num_rows: int, num_splits: int) -> Parts:
    """Return room for the parts of some rows' heads, which are those of q."""
    num_heads, head_dim = q.shape[1:]
    num_parts = num_rows * num_heads * num_splits
    values = torch.empty(num_parts, head_dim, device=q.device, dtype=torch.float32)
    return values, values.new_empty(num_parts), values.new_empty(num_parts)


@triton.jit
def find_split(  # type: ignore[no-untyped-def]
    first, end, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Return where a program's share of the keys from first to end begins and ends."""
    lo, hi = first // TILE * TILE, end
    if SPLITS > 1:
        size = split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
        lo += tl.program_id(2) * size
        hi = tl.minimum(lo + size, hi)
    return lo, hi


@triton.jit
def split_size(  # type: ignore[no-untyped-def]
    num_keys, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Keys per split, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), TILE) * TILE, MIN_SPLIT)


@triton.jit
def store_parts(parts, indices, dims, softmax, is_row, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    values, maxima, sums = parts
    acc, row_max, row_sum = softmax
    is_real = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(values + indices[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_real)
    tl.store(maxima + indices, row_max, mask=is_row)
    tl.store(sums + indices, row_sum, mask=is_row)


@triton.jit
def load_parts(parts, indices, dims, is_used, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load some parts; what is not used is a part without keys."""
    values, maxima, sums = parts
    is_real = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(values + indices[:, None] * HEAD_DIM + dims[None, :], mask=is_real, other=0.0)
    row_max = tl.load(maxima + indices, mask=is_used, other=float("-inf"))
    return acc, row_max, tl.load(sums + indices, mask=is_used, other=0.0)


@triton.jit
def join_splits(  # type: ignore[no-untyped-def]
    parts,
    row,
    dims,
    first,
    end,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Return the weighted mean of a row's values over its keys, from first to end; none: zeros."""
    lo = first // TILE * TILE
    size = split_size(end - lo, SPLITS, TILE, MIN_SPLIT)
    splits = tl.arange(0, SPLITS)
    is_used = lo + splits * size < end  # those that got no keys stored nothing
    acc, maxima, sums = load_parts(parts, row * SPLITS + splits, dims, is_used, HEAD_DIM)
    highest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(sums * weights, 0)
    return tl.sum(acc * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
