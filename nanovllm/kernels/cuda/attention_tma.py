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
    find_lines,
    find_queries,
)
from nanovllm.kernels.cuda.attention_tiles import (
    COLUMNS,
    LOG2_E,
    begin_softmax,
    kernel_shape,
    store_softmax,
    weigh,
)

CONFIG = PrefillConfig(lines=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def suits_tma(q: Tensor, k_cache: Tensor, max_query_len: int, window: int | None) -> bool:
    """Whether the kernel takes these tensors, and there are enough queries for it."""
    group, head_dim = q.shape[1] // k_cache.shape[2], q.shape[2]
    is_whole = k_cache.shape[1] % CONFIG.tile == 0  # a tile lies in one block
    is_long = len(q) * group > MAX_SMALL and max_query_len * group >= CONFIG.lines >= group
    return is_whole and is_long and head_dim in (64, 128) and window is None and q.itemsize == 2


def tma_prefill(
    q: Tensor,  # as for paged_prefill
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    out: Tensor,
    scale: float,
    window: int | None = None,  # must be None: see suits_tma
    config: PrefillConfig | None = None,
) -> None:
    """Attend causally from the last query_lens tokens of each row's context."""
    config = config or CONFIG
    num_rows, group = slots.shape[0], q.shape[1] // k_cache.shape[2]
    assert k_cache.shape[1] % config.tile == 0
    assert window is None
    assert k_cache.stride(0) % k_cache.stride(1) == 0
    shape = kernel_shape(q, k_cache, v_cache, block_table, out, window)
    num_tiles = triton.cdiv(max_query_len, config.lines // group)
    if num_rows * num_tiles == 0:
        return
    columns = slots, context_lens, query_starts, query_lens
    _prefill_kernel[num_rows * k_cache.shape[2], num_tiles](
        *(q, describe(k_cache, config.tile), describe(v_cache, config.tile), block_table),
        *(*columns, out, scale * LOG2_E, q.stride(0), block_table.stride(0)),
        k_cache.stride(0) // k_cache.stride(1),
        **{name: shape[name] for name in ("GROUP", "KV_HEADS", "HEAD_DIM", "BLOCK_SIZE")},
        LINES=config.lines,
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
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Some queries of one row over all their keys, for the heads of one kv head."""
    most_queries: tl.constexpr = LINES // GROUP
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
    queries, heads, is_line = find_lines(kv_head, num_queries - skipped, most_queries, GROUP, LINES)
    q = q + token * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q, mask=is_line[:, None], other=0.0)
    positions = lowest + queries
    acc, line_sum = _attend(
        *(q_tile, k_rows, v_rows, blocks, kv_head * HEAD_DIM, positions, lowest, highest, length),
        *(block_stride, scale, HEAD_DIM, BLOCK_SIZE, LINES, TILE),
    )
    out_lines = (token + queries) * (KV_HEADS * GROUP) + heads
    store_softmax(out, out_lines, dims, acc, line_sum, is_line[:, None], HEAD_DIM)


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
    LINES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the weighted sums of values, and the sums of weights, of queries at some positions.

    Their head begins at a column of the cache; the positions are from lowest to highest.
    """
    acc, line_max, line_sum = begin_softmax(LINES, HEAD_DIM)
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
        weights, alpha, line_max, line_sum = weigh(scores, line_max, line_sum, scale)
        v = v_rows.load([cache_row, column])
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
        cache_row = block_id * block_stride + (tile_start + TILE) % BLOCK_SIZE
        scores = tl.dot(q_tile, k_rows.load([cache_row, column]).T)
        block_id = later_id
    if whole <= highest:
        scores = _hide_later(scores, whole + offsets, positions)
        weights, alpha, line_max, line_sum = weigh(scores, line_max, line_sum, scale)
        v = v_rows.load([cache_row, column])
        v = tl.where((whole + offsets < length)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    return acc, line_sum


@triton.jit
def _hide_later(scores, keys, positions):  # type: ignore[no-untyped-def]
    """Hide keys from the queries before them."""
    return tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
