"""Tiles of keys and values of a paged KV cache, and the online softmax over them.

A row of a query tile is one query of one head. The tile has rows for all heads of a GQA group, so
each key is read once for the whole group. Keys outside a sequence's context or window are never
used: their blocks may hold anything, or may have been freed.

If the keys are split over CTAs, each CTA stores a partial result per row: the unnormalized output,
the maximum score, and the softmax denominator relative to that maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.fp8_rows import (
    add_values,
    join,
    load_exponents,
    multiply_keys,
    prepare_queries,
    scale_scores,
    softcap,
    split,
    weigh_fp8,
)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of a layer, and the block table of all slots."""

    k: Tensor  # [num_blocks, block_size, kv_heads, head_dim], with any stride(0)
    v: Tensor  # same layout as k
    block_table: Tensor  # [num_slots, max_blocks]; unused entries may hold anything
    exponents: tuple[Tensor, Tensor] | tuple[()] = ()  # FP8 scale exponents, as in LayerCache

    @property
    def is_fp8(self) -> bool:
        return len(self.exponents) > 0

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Kernel arguments: keys and values; with FP8, pairs as int16, then exponents as int32."""
        if not self.is_fp8:
            return self.k, self.v
        words = (part.flatten().view(torch.int32) for part in self.exponents)
        return self.k.view(torch.int16), self.v.view(torch.int16), *words

    @property
    def max_context(self) -> int:
        """Maximum context length that the block table can hold for a slot."""
        return self.block_table.shape[1] * self.k.shape[1]


# (unnormalized outputs [partials, head_dim], maximum scores, softmax denominators)
Partials = tuple[Tensor, Tensor, Tensor]


def allocate_partials(q: Tensor, num_rows: int, num_splits: int) -> Partials:
    """Allocate the partial results of `num_rows` rows, for all heads of `q`."""
    num_heads, head_dim = q.shape[1:]
    num_partials = num_rows * num_heads * num_splits
    values = torch.empty(num_partials, head_dim, device=q.device, dtype=torch.float32)
    return values, values.new_empty(num_partials), values.new_empty(num_partials)


@triton.jit
def head_dims(HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the indices of a head's dimensions, padded to a power of two."""
    return tl.arange(0, triton.next_power_of_2(HEAD_DIM))


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    softmax,
    q_tile,
    caches,
    kv_head,
    blocks,
    block_ids,
    length,
    span,
    seen_by_all,
    seen,
    block_stride,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MANY: tl.constexpr,
):
    """Update the online softmax of a query tile with a span of one KV head's keys.

    `softmax` holds the unnormalized outputs, maximum scores and denominators of the rows. `span` is
    (begin, end, first valid key); the first tile may begin before the first valid key.
    `seen_by_all` is the range [begin, end) of keys that all rows attend to, and `seen` holds each
    row's first and last key (inclusive). Only tiles that reach beyond `seen_by_all` need a mask.
    HAS_MANY means that a row of the batch may have many queries.
    """
    IS_FP8: tl.constexpr = len(caches) > 2
    WIDTH: tl.constexpr = HEAD_DIM // 2 if IS_FP8 else HEAD_DIM  # FP8 is read in pairs
    column = kv_head * WIDTH
    heads = caches[0] + column, caches[1] + column
    exponents = ()
    if IS_FP8:  # even and odd columns are accumulated separately
        word = kv_head * (BLOCK_SIZE // 4)
        exponents = caches[2] + word, caches[3] + word  # type: ignore[assignment]
        q_tile, scale = prepare_queries(q_tile, scale)
        softmax = split(softmax[0]), softmax[1], softmax[2]
    lo, hi, first = span
    whole = lo
    if HAS_MANY and WINDOW is None:  # tiles that contain only valid keys come first
        whole = tl.maximum(tl.minimum(tl.cdiv(hi, TILE), length // TILE) * TILE, lo)
        softmax, block_ids = _attend_tiles(
            *(softmax, q_tile, heads, exponents, blocks, block_ids, length, (lo, whole, first)),
            *(seen_by_all, seen, block_stride, scale, SOFTCAP),
            *(WIDTH, KV_HEADS, BLOCK_SIZE, TILE, True),
        )
    softmax, _ = _attend_tiles(
        *(softmax, q_tile, heads, exponents, blocks, block_ids, length, (whole, hi, first)),
        *(seen_by_all, seen, block_stride, scale, SOFTCAP),
        *(WIDTH, KV_HEADS, BLOCK_SIZE, TILE, False),
    )
    if IS_FP8:
        softmax = join(softmax[0][0], softmax[0][1]), softmax[1], softmax[2]
    return softmax


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    softmax,
    q_tile,
    heads,
    exponents,
    blocks,
    block_ids,
    length,
    span,
    seen_by_all,
    seen,
    block_stride,
    scale,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
):
    """Update the online softmax with tiles of keys; also return the block ids of the next tile.

    ARE_WHOLE means that the tiles contain only valid keys. Block ids are loaded one iteration
    ahead: loads that depend on another load are not pipelined.
    """
    lo, hi, first = span
    acc, row_max, row_sum = softmax
    dims = head_dims(HEAD_DIM)
    for tile_start in tl.range(lo, hi, TILE):
        keys = tile_start + tl.arange(0, TILE)
        is_key = (keys >= first) & (keys < hi)
        offsets = block_ids * block_stride + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        if len(exponents) > 0:
            scales = load_exponents(exponents, block_ids * KV_HEADS, tile_start, BLOCK_SIZE, TILE)
        block_ids = find_blocks(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
        is_partial = tile_start + TILE > seen_by_all[1]
        if not ARE_WHOLE:
            is_partial = (tile_start < seen_by_all[0]) | is_partial
        k = _load_tile(heads[0], offsets, dims, is_key, HEAD_DIM, ARE_WHOLE)
        if len(exponents) == 0:
            scores = tl.dot(q_tile, k.T, input_precision="ieee")
            if SOFTCAP is not None:
                scores = softcap(scores * scale, SOFTCAP)
        else:
            scores = scale_scores(multiply_keys(q_tile, k), scales, scale, SOFTCAP)
        if is_partial:
            is_seen = (keys[None, :] >= seen[0][:, None]) & (keys[None, :] <= seen[1][:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        if len(exponents) == 0:
            factor = scale if SOFTCAP is None else 1.0  # capped scores are scaled already
            weights, alpha, row_max, row_sum = _weigh(scores, row_max, row_sum, factor)
        else:
            weights, alpha, row_max, row_sum = weigh_fp8(scores, scales, row_max, row_sum)
        v = _load_tile(heads[1], offsets, dims, is_key, HEAD_DIM, ARE_WHOLE)
        if len(exponents) == 0:
            acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        else:
            acc = add_values(acc, weights, v, alpha, q_tile[0].dtype)
    return (acc, row_max, row_sum), block_ids


@triton.jit
def attend_keys_by_tma(  # type: ignore[no-untyped-def]
    softmax,
    q_tile,
    k_rows,
    v_rows,
    blocks,
    column,
    positions,
    lowest,
    highest,
    length,
    block_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update the online softmax with all keys of the KV head at `column`, loaded by TMA.

    TMA computes the addresses. That leaves enough registers to compute the scores of a tile during
    the softmax of the previous tile. The queries' positions range from `lowest` to `highest`.
    """
    acc, row_max, row_sum = softmax
    offsets = tl.arange(0, TILE)
    cache_row = tl.load(blocks) * block_stride
    scores = tl.dot(q_tile, k_rows.load([cache_row, column]).T)
    block_id = tl.load(blocks + TILE // BLOCK_SIZE, mask=highest >= TILE, other=0)
    # The last tile of a context may be partial. Beyond the context it holds arbitrary values.
    whole = tl.minimum(tl.cdiv(highest + 1, TILE), length // TILE) * TILE
    for tile_start in tl.range(0, whole, TILE):
        if tile_start + TILE > lowest + 1:
            scores = _hide_later(scores, tile_start + offsets, positions)
        # Load the block id of the tile after next now: loads that depend on another load are slow.
        later = tile_start + 2 * TILE
        later_id = tl.load(blocks + later // BLOCK_SIZE, mask=later <= highest, other=0)
        weights, alpha, row_max, row_sum = _weigh(scores, row_max, row_sum, scale)
        v = v_rows.load([cache_row, column])
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
        cache_row = block_id * block_stride + (tile_start + TILE) % BLOCK_SIZE
        scores = tl.dot(q_tile, k_rows.load([cache_row, column]).T)
        block_id = later_id
    if whole <= highest:
        scores = _hide_later(scores, whole + offsets, positions)
        weights, alpha, row_max, row_sum = _weigh(scores, row_max, row_sum, scale)
        v = v_rows.load([cache_row, column])
        v = tl.where((whole + offsets < length)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit
def _hide_later(scores, keys, positions):  # type: ignore[no-untyped-def]
    """Mask the scores of keys that come after the query."""
    return tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    heads, offsets, dims, is_key, HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Load keys or values [TILE, dims]; unless IS_WHOLE, invalid keys are loaded as zeros."""
    tile = heads + (offsets[:, None] + dims[None, :])
    is_dim = (dims < HEAD_DIM)[None, :]
    if not IS_WHOLE:
        values = tl.load(tile, mask=is_key[:, None] & is_dim, other=0.0)
    elif dims.shape[0] != HEAD_DIM:
        values = tl.load(tile, mask=is_dim, other=0.0)
    else:
        values = tl.load(tile)
    return values


@triton.jit
def _weigh(scores, row_max, row_sum, scale):  # type: ignore[no-untyped-def]
    """Update the online softmax with a tile's scores.

    Return the unnormalized probabilities, the rescaling factor of earlier tiles, and the new
    maximum and denominator.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # For a row without any key yet, -inf minus -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    return weights, alpha, new_max, row_sum * alpha + tl.sum(weights, 1)


@triton.jit
def window_start(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key that a query at `position` attends to."""
    return position * 0 if WINDOW is None else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def find_blocks(  # type: ignore[no-untyped-def]
    blocks, tile_start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Return the block id of every key of a tile, or a scalar if one block holds the whole tile."""
    if BLOCK_SIZE % TILE == 0 or TILE % BLOCK_SIZE == 0:  # one scalar load per block
        first = tile_start // BLOCK_SIZE
        ids = tl.load(blocks + first, mask=tile_start < end, other=0)
        for i in tl.static_range(1, TILE // BLOCK_SIZE):
            is_used = tile_start + i * BLOCK_SIZE < end
            block_id = tl.load(blocks + first + i, mask=is_used, other=0)
            ids = tl.where(tl.arange(0, TILE) >= i * BLOCK_SIZE, block_id, ids)
    else:
        keys = tile_start + tl.arange(0, TILE)
        ids = tl.load(blocks + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return ids.to(tl.int64)


@triton.jit
def find_split(  # type: ignore[no-untyped-def]
    first, end, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Return this CTA's range of the keys [first, end); it begins at a tile boundary."""
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
    """Return the number of keys per split: a multiple of the tile size, and at least MIN_SPLIT."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), TILE) * TILE, MIN_SPLIT)


@triton.jit
def store_partials(partials, indices, dims, softmax, is_row, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    values, maxima, sums = partials
    acc, row_max, row_sum = softmax
    is_real = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(values + indices[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_real)
    tl.store(maxima + indices, row_max, mask=is_row)
    tl.store(sums + indices, row_sum, mask=is_row)


@triton.jit
def load_partials(partials, indices, dims, is_used, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load partial results; where `is_used` is false, return those of an empty split."""
    values, maxima, sums = partials
    is_real = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(values + indices[:, None] * HEAD_DIM + dims[None, :], mask=is_real, other=0.0)
    row_max = tl.load(maxima + indices, mask=is_used, other=float("-inf"))
    return acc, row_max, tl.load(sums + indices, mask=is_used, other=0.0)
