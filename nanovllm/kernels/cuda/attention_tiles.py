"""What the kernels of paged attention share.

The query heads that share a kv head are rows of one tile, so each key is read once for them all:
a row of a tile is one query of one head. Keys outside a sequence's context or window are never
used: their blocks may hold anything, or be gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.attention_splits import store_parts
from nanovllm.kernels.cuda.fp8_rows import (
    add_values,
    as_multiplied,
    join,
    load_exponents,
    multiply_keys,
    scale_scores,
    split,
    weigh_codes,
)

LOG2_E = 1.4426950408889634  # the softmax runs in base 2, which the hardware has an instruction for
MIN_Q_ROWS = 16  # tl.dot takes no fewer
# They may begin anywhere in an upload: a kernel for every alignment would be compiled anew.
COLUMNS = (
    *("slots", "context_lens", "query_starts", "query_lens", "query_index", "order"),
    *("members", "shared_lens"),
)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A layer's keys and values, and the blocks of every slot."""

    k: Tensor  # [num_blocks, block_size, kv_heads, head_dim]; stride(0) is free
    v: Tensor  # likewise
    block_table: Tensor  # [num_slots, max_blocks]; unused entries may hold anything
    exponents: tuple[Tensor, Tensor] | tuple[()] = ()  # of keys and values, as in LayerCache

    @property
    def has_codes(self) -> bool:
        return len(self.exponents) > 0

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Keys and values; with exponents, which are words of four, they are pairs of codes."""
        if not self.has_codes:
            return self.k, self.v
        words = (part.flatten().view(torch.int32) for part in self.exponents)
        return self.k.view(torch.int16), self.v.view(torch.int16), *words

    @property
    def max_context(self) -> int:
        """What a slot has room for in the table."""
        return self.block_table.shape[1] * self.k.shape[1]


def kernel_shape(
    q: Tensor, cache: PagedCache, out: Tensor | None, window: int | None
) -> dict[str, int | None]:
    """Collect what a kernel is compiled for, and check the layouts that it takes for granted."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = cache.k.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert block_size % 16 == 0
    assert q.stride()[1:] == (head_dim, 1)
    assert out is None or (out.shape == q.shape and out.is_contiguous())
    assert cache.k.stride() == cache.v.stride()
    assert cache.k.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    assert cache.block_table.stride(1) == 1
    for part in cache.exponents:
        assert part.is_contiguous()
        assert part.shape == (len(cache.k), num_kv_heads, block_size)
    group = num_heads // num_kv_heads
    sizes = {"GROUP": group, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim}
    return {"WINDOW": window, **sizes, "BLOCK_SIZE": block_size}


def strides(q: Tensor, cache: PagedCache) -> tuple[int, int, int]:
    """Return those of tokens in q, of slots in the block table and of blocks in `cache.parts`."""
    return q.stride(0), cache.block_table.stride(0), cache.parts[0].stride(0)


@triton.jit
def head_dims(HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of a head, and beyond them up to a power of two."""
    return tl.arange(0, triton.next_power_of_2(HEAD_DIM))


@triton.jit
def find_head(caches, kv_head, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of a head's keys and values and, if there are any, of their exponents."""
    if len(caches) == 2:
        column = kv_head * HEAD_DIM
        return caches[0] + column, caches[1] + column
    else:
        pair, word = kv_head * (HEAD_DIM // 2), kv_head * (BLOCK_SIZE // 4)
        return caches[0] + pair, caches[1] + pair, caches[2] + word, caches[3] + word


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    heads, offsets, dims, is_key, HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Load keys or values [TILE, dims]; what is not a key is zeros, whatever is there."""
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
def begin_softmax(Q_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums of values, the maxima and the sums of weights of rows without keys yet."""
    acc = tl.zeros((Q_ROWS, triton.next_power_of_2(HEAD_DIM)), tl.float32)
    return acc, tl.full((Q_ROWS,), float("-inf"), tl.float32), tl.zeros((Q_ROWS,), tl.float32)


@triton.jit
def begin_tiles(softmax, q_tile, scale, HAS_CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prepare queries and sums for pairs of codes: their even columns and their odd ones apart."""
    if not HAS_CODES:
        return softmax, q_tile, scale
    else:
        acc, row_max, row_sum = softmax
        q_tile, scale = as_multiplied(q_tile, scale)
        return (split(acc), row_max, row_sum), q_tile, scale


@triton.jit
def end_tiles(softmax, HAS_CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    if not HAS_CODES:
        return softmax
    else:
        acc, row_max, row_sum = softmax
        return join(acc[0], acc[1]), row_max, row_sum


@triton.jit
def store_softmax(  # type: ignore[no-untyped-def]
    out, parts, out_rows, dims, softmax, is_row, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """Store rows of out [tokens * heads, head_dim], or the parts of them that a program has."""
    if parts is None:
        acc, _, row_sum = softmax
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # padding, or no context: zeros
        values = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        is_real = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], values, mask=is_real)
    else:
        indices = out_rows * SPLITS + tl.program_id(2)
        store_parts(parts, indices, dims, softmax, is_row, HEAD_DIM)


@triton.jit
def attend_head(  # type: ignore[no-untyped-def]
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
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MANY: tl.constexpr,
):
    """Take a span of one head's keys, which may be many, into the softmax."""
    caches = find_head(caches, kv_head, HEAD_DIM, BLOCK_SIZE)
    WIDTH: tl.constexpr = HEAD_DIM if len(caches) == 2 else HEAD_DIM // 2
    softmax, q_tile, scale = begin_tiles(softmax, q_tile, scale, len(caches) > 2)
    dims = head_dims(WIDTH)
    lo, hi, first = span
    whole = lo
    if HAS_MANY and WINDOW is None:  # the tiles whose keys are all there come first
        whole = tl.maximum(tl.minimum(tl.cdiv(hi, TILE), length // TILE) * TILE, lo)
        softmax, block_ids = attend_tiles(
            *(softmax, q_tile, caches, blocks, block_ids, length, dims, (lo, whole, first)),
            *(seen_by_all, seen, block_stride, scale, WIDTH, KV_HEADS, BLOCK_SIZE, TILE, True),
        )
    softmax, _ = attend_tiles(
        *(softmax, q_tile, caches, blocks, block_ids, length, dims, (whole, hi, first)),
        *(seen_by_all, seen, block_stride, scale, WIDTH, KV_HEADS, BLOCK_SIZE, TILE, False),
    )
    return end_tiles(softmax, len(caches) > 2)


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    softmax,
    q_tile,
    caches,
    blocks,
    block_ids,
    length,
    dims,
    span,
    seen_by_all,
    seen,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
):
    """Take tiles of keys into the softmax; return it, and the blocks of the tile that follows.

    The caches are what `find_head` found, the queries and sums what `begin_tiles` makes of them if
    there are exponents: HEAD_DIM and dims then count pairs of codes. The span is from where to
    where, and the first key that is there: the first tile may begin before it. Every row sees the
    keys of seen_by_all, from the first to before the end, and each one those of seen, from the
    first to the last: only tiles that reach beyond need a mask.
    Block ids are loaded a step ahead: a load that waits for another would end the pipelining.
    """
    lo, hi, first = span
    for tile_start in tl.range(lo, hi, TILE):
        keys = tile_start + tl.arange(0, TILE)
        is_key = (keys >= first) & (keys < hi)
        offsets = block_ids * block_stride + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        exponents = ()
        if len(caches) > 2:
            exponents = load_exponents(
                (caches[2], caches[3]), block_ids * KV_HEADS, tile_start, BLOCK_SIZE, TILE
            )
        block_ids = find_blocks(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
        is_partial = tile_start + TILE > seen_by_all[1]
        if not ARE_WHOLE:
            is_partial = (tile_start < seen_by_all[0]) | is_partial
        softmax = attend_tile(
            *(softmax, q_tile, caches, offsets, exponents, dims, keys, is_key, seen, is_partial),
            *(scale, HEAD_DIM, ARE_WHOLE),
        )
    return softmax, block_ids


@triton.jit
def attend_tile(  # type: ignore[no-untyped-def]
    softmax,
    q_tile,
    caches,
    offsets,
    exponents,
    dims,
    keys,
    is_key,
    seen,
    is_partial,
    scale,
    HEAD_DIM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Take a tile of keys and values into the softmax so far.

    A row sees the keys from seen's first to its last; is_partial: not all of the tile's.
    """
    acc, row_max, row_sum = softmax
    k = load_tile(caches[0], offsets, dims, is_key, HEAD_DIM, IS_WHOLE)
    if len(exponents) == 0:
        scores = tl.dot(q_tile, k.T, input_precision="ieee")
    else:
        scores = scale_scores(multiply_keys(q_tile, k), exponents, scale)
    if is_partial:
        is_seen = (keys[None, :] >= seen[0][:, None]) & (keys[None, :] <= seen[1][:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, alpha, row_max, row_sum = weigh_tile(scores, exponents, row_max, row_sum, scale)
    v = load_tile(caches[1], offsets, dims, is_key, HEAD_DIM, IS_WHOLE)
    if len(exponents) == 0:
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    else:
        acc = add_values(acc, weights, v, alpha, q_tile[0].dtype)
    return acc, row_max, row_sum


@triton.jit
def weigh_tile(scores, exponents, row_max, row_sum, scale):  # type: ignore[no-untyped-def]
    """Weigh products with keys, or what `scale_scores` made of them if there are exponents."""
    if len(exponents) == 0:
        weighed = weigh(scores, row_max, row_sum, scale)
    else:
        weighed = weigh_codes(scores, exponents, row_max, row_sum)
    return weighed


@triton.jit
def weigh(scores, row_max, row_sum, scale):  # type: ignore[no-untyped-def]
    """Return a tile's weights, the factor for what came before, and the new maximum and sum."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    return weights, alpha, new_max, row_sum * alpha + tl.sum(weights, 1)


@triton.jit
def window_start(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at a position sees."""
    return position * 0 if WINDOW is None else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def find_blocks(  # type: ignore[no-untyped-def]
    blocks, tile_start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """The block of every key of a tile, or as a scalar the one that holds them all."""
    if BLOCK_SIZE % TILE == 0 or TILE % BLOCK_SIZE == 0:  # scalars, which take one load each
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
