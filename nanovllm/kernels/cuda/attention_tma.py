"""Prefill attention for Hopper: tiles of keys come by TMA, and scores are a tile ahead.

The same as `paged_prefill` for the shapes that long prompts have. The copy engine computes the
addresses, so registers are left to compute the scores of one tile while the softmax of the tile
before it runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.cuda.attention_prefill import (
    MAX_SMALL,
    PrefillConfig,
    PrefillRows,
    find_queries,
    find_rows,
)
from nanovllm.kernels.cuda.attention_tiles import (
    COLUMNS,
    LOG2_E,
    PagedCache,
    begin_softmax,
    kernel_shape,
    store_softmax,
    weigh,
)

CONFIG = PrefillConfig(q_rows=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def suits_tma(q: Tensor, cache: PagedCache, max_query_len: int, window: int | None) -> bool:
    """Whether the kernel takes these tensors, and there are enough queries for it."""
    group, head_dim = q.shape[1] // cache.k.shape[2], q.shape[2]
    is_whole = cache.k.shape[1] % CONFIG.tile == 0  # a tile lies in one block
    is_long = len(q) * group > MAX_SMALL and max_query_len * group >= CONFIG.q_rows >= group
    is_plain = window is None and not cache.has_codes
    return is_whole and is_long and head_dim in (64, 128) and is_plain and q.itemsize == 2


def tma_prefill(
    q: Tensor,  # all as for paged_prefill
    cache: PagedCache,
    rows: PrefillRows,
    out: Tensor,
    scale: float,
    config: PrefillConfig = CONFIG,
) -> None:
    """Attend causally from the last query_lens tokens of each row's context."""
    num_rows, num_kv_heads = len(rows.slots), cache.k.shape[2]
    block_stride, key_stride = cache.k.stride()[:2]
    assert cache.k.shape[1] % config.tile == 0
    assert block_stride % key_stride == 0
    shape = kernel_shape(q, cache, out, window=None)
    num_tiles = triton.cdiv(rows.max_query_len, config.q_rows * num_kv_heads // q.shape[1])
    if num_rows * num_tiles == 0:
        return
    _prefill_kernel[num_rows * num_kv_heads, num_tiles](
        *(q, describe(cache.k, config.tile), describe(cache.v, config.tile), cache.block_table),
        *(rows.slots, rows.context_lens, rows.query_starts, rows.query_lens),
        *(out, scale * LOG2_E, q.stride(0), cache.block_table.stride(0)),
        block_stride // key_stride,
        **{name: shape[name] for name in ("GROUP", "KV_HEADS", "HEAD_DIM", "BLOCK_SIZE")},
        Q_ROWS=config.q_rows,
        TILE=config.tile,
        PAIRS=config.pairs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )


def describe(cache: Tensor, tile: int) -> TensorDescriptor:
    """Describe a cache as rows, one for each token that its blocks and what lies between hold."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    width = num_kv_heads * head_dim
    num_rows = (num_blocks - 1) * (cache.stride(0) // width) + block_size
    return TensorDescriptor(cache, [num_rows, width], [width, 1], [tile, head_dim])


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    k_rows,
    v_rows,
    block_table,
    slots,
    context_lens,
    query_starts,
    query_lens,
    out,
    scale,
    q_stride,
    table_stride,
    block_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Some queries of one row over all their keys, for the heads of one kv head."""
    most_queries: tl.constexpr = Q_ROWS // GROUP
    row, kv_head, skipped = find_queries(most_queries, KV_HEADS, PAIRS)
    num_queries = tl.load(query_lens + row)
    if skipped >= num_queries:
        return
    length = tl.load(context_lens + row)
    lowest = length - num_queries + skipped  # position of the first query
    highest = tl.minimum(lowest + most_queries, length) - 1
    token = tl.load(query_starts + row).to(tl.int64) + skipped
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    dims = tl.arange(0, HEAD_DIM)
    queries, heads, is_row = find_rows(kv_head, num_queries - skipped, GROUP, Q_ROWS)
    q = q + token * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q, mask=is_row[:, None], other=0.0)
    positions = lowest + queries
    softmax = _attend(
        *(q_tile, k_rows, v_rows, blocks, kv_head * HEAD_DIM, positions, lowest, highest, length),
        *(block_stride, scale, HEAD_DIM, BLOCK_SIZE, Q_ROWS, TILE),
    )
    out_rows = (token + queries) * (KV_HEADS * GROUP) + heads
    store_softmax(out, None, out_rows, dims, softmax, is_row, HEAD_DIM, 1)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the softmax of queries at some positions, as `begin_softmax` does.

    Their head begins at a column of the cache; the positions are from lowest to highest.
    """
    acc, row_max, row_sum = begin_softmax(Q_ROWS, HEAD_DIM)
    offsets = tl.arange(0, TILE)
    cache_row = tl.load(blocks) * block_stride
    scores = tl.dot(q_tile, k_rows.load([cache_row, column]).T)
    block_id = tl.load(blocks + TILE // BLOCK_SIZE, mask=highest >= TILE, other=0)
    # All but the last tile of a context are whole; that one's values may be anything.
    whole = tl.minimum(tl.cdiv(highest + 1, TILE), length // TILE) * TILE
    for tile_start in tl.range(0, whole, TILE):
        if tile_start + TILE > lowest + 1:
            scores = _hide_later(scores, tile_start + offsets, positions)
        later = tile_start + 2 * TILE  # its block's id: a load that waits for another is slow
        later_id = tl.load(blocks + later // BLOCK_SIZE, mask=later <= highest, other=0)
        weights, alpha, row_max, row_sum = weigh(scores, row_max, row_sum, scale)
        v = v_rows.load([cache_row, column])
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
        cache_row = block_id * block_stride + (tile_start + TILE) % BLOCK_SIZE
        scores = tl.dot(q_tile, k_rows.load([cache_row, column]).T)
        block_id = later_id
    if whole <= highest:
        scores = _hide_later(scores, whole + offsets, positions)
        weights, alpha, row_max, row_sum = weigh(scores, row_max, row_sum, scale)
        v = v_rows.load([cache_row, column])
        v = tl.where((whole + offsets < length)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit
def _hide_later(scores, keys, positions):  # type: ignore[no-untyped-def]
    """Hide keys from the queries before them."""
    return tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
