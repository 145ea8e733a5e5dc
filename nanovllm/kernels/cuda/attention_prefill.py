"""Attention over a paged KV cache for rows of several query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.attention_tiles import (
    COLUMNS,
    LOG2_E,
    attend_tiles,
    begin_softmax,
    find_blocks,
    kernel_shape,
    store_softmax,
    window_start,
)
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    lines: int  # queries times query heads per kv head in one program
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs run side by side
    pairs: int = 16  # (row, kv head) pairs that run side by side, so that L2 serves their keys


def prefill_config(head_dim: int, dtype: torch.dtype, num_lines: int) -> PrefillConfig:
    """Choose what measured fastest, for rows of up to num_lines lines."""
    is_wide = head_dim > 128
    if dtype == torch.float32:
        return PrefillConfig(lines=32, tile=16 if is_wide else 32, num_warps=4, num_stages=2)
    if num_lines <= 64:
        lines = 16 if num_lines <= 16 else 64
        return PrefillConfig(lines, tile=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide:
        return PrefillConfig(lines=128, tile=32, num_warps=8, num_stages=3)
    return PrefillConfig(lines=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def paged_prefill(
    q: Tensor,  # [tokens, heads, head_dim]; stride(0) is free
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]; stride(0) is free
    v_cache: Tensor,
    block_table: Tensor,  # [num_slots, max_blocks]; unused entries may hold anything
    slots: Tensor,  # [rows], each row's line of block_table
    query_starts: Tensor,  # [rows], each row's first token in q and out
    query_lens: Tensor,  # [rows], its queries: the last tokens of its context; 0 is padding
    context_lens: Tensor,  # [rows], the keys each row's last query attends to
    max_query_len: int,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    scale: float,
    window: int | None,
    config: PrefillConfig | None = None,
) -> None:
    """Attend causally from the last query_lens tokens of each row's context."""
    num_rows, group = slots.shape[0], q.shape[1] // k_cache.shape[2]
    config = config or prefill_config(q.shape[2], q.dtype, max_query_len * group)
    num_lines = max(config.lines, triton.next_power_of_2(group))
    num_tiles = triton.cdiv(max_query_len, num_lines // group)
    shape = kernel_shape(q, k_cache, v_cache, block_table, out, window)
    if num_rows * num_tiles == 0:
        return
    columns = slots, context_lens, query_starts, query_lens
    _prefill_kernel[num_rows * k_cache.shape[2], num_tiles](
        *(q, k_cache, v_cache, block_table, *columns, out),
        *(scale * LOG2_E, q.stride(0), block_table.stride(0), k_cache.stride(0)),
        **shape,
        TILE=config.tile,
        QUERIES=num_lines // group,
        LINES=num_lines,
        PAIRS=config.pairs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **launch_options(q, len(q)),
    )


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
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
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """QUERIES queries of one row over all their keys, for the heads of one kv head."""
    wait_for_inputs(OVERLAP)  # a grid of programs that all return would not have waited
    row, kv_head, skipped = find_queries(QUERIES, KV_HEADS, PAIRS)
    num_queries = tl.load(query_lens + row)
    if skipped >= num_queries:
        return
    length = tl.load(context_lens + row)
    lowest = length - num_queries + skipped  # position of the first query
    highest = tl.minimum(lowest + QUERIES, length) - 1
    first = window_start(lowest, WINDOW)
    lo, hi = first // TILE * TILE, highest + 1
    token = tl.load(query_starts + row).to(tl.int64) + skipped
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    dims = tl.arange(0, DIM_PAD)
    queries, heads, is_line = find_lines(kv_head, num_queries - skipped, QUERIES, GROUP, LINES)
    is_real = is_line[:, None] & (dims < HEAD_DIM)[None, :]
    q_places = q + token * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q_places, mask=is_real, other=0.0)
    positions = lowest + queries
    firsts = window_start(positions, WINDOW)
    acc, line_max, line_sum = begin_softmax(LINES, DIM_PAD)
    full_lo, full_hi = window_start(highest, WINDOW), lowest + 1
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    whole = lo
    if WINDOW is None:  # first the tiles whose keys are all there
        whole = tl.minimum(tl.cdiv(hi, TILE), length // TILE) * TILE
        acc, line_max, line_sum, block_ids = attend_tiles(
            *(acc, line_max, line_sum, q_tile, k_cache, v_cache, blocks, block_ids, length, dims),
            *(lo, whole, first, hi, full_lo, full_hi, firsts, positions, block_stride, scale),
            *(HEAD_DIM, KV_HEADS * HEAD_DIM, BLOCK_SIZE, TILE, True),
        )
    acc, line_max, line_sum, _ = attend_tiles(
        *(acc, line_max, line_sum, q_tile, k_cache, v_cache, blocks, block_ids, length, dims),
        *(whole, hi, first, hi, full_lo, full_hi, firsts, positions, block_stride, scale),
        *(HEAD_DIM, KV_HEADS * HEAD_DIM, BLOCK_SIZE, TILE, False),
    )
    line_sum = tl.where(line_sum == 0.0, 1.0, line_sum)  # a line that is padding
    out_lines = (token + queries) * (KV_HEADS * GROUP) + heads
    store_softmax(out, out_lines, dims, acc, line_sum, is_real, HEAD_DIM)


@triton.jit
def find_queries(  # type: ignore[no-untyped-def]
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr
):
    """Return a program's row and kv head, and how many of the row's queries come before its own.

    PAIRS pairs of row and head at a time, so that L2 serves their keys; the longest tiles first.
    """
    num_pairs, num_tiles = tl.num_programs(0), tl.num_programs(1)
    index = tl.program_id(1) * num_pairs + tl.program_id(0)
    pair = index // (PAIRS * num_tiles) * PAIRS
    index -= pair * num_tiles
    width = tl.minimum(num_pairs - pair, PAIRS)
    pair += index % width
    return pair // KV_HEADS, pair % KV_HEADS, (num_tiles - 1 - index // width) * QUERIES


@triton.jit
def find_lines(  # type: ignore[no-untyped-def]
    kv_head, num_left, QUERIES: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr
):
    """Return the query and the head of every line of a tile, and whether there is such a query."""
    lines = tl.arange(0, LINES)
    queries = lines // GROUP
    is_line = (queries < QUERIES) & (queries < num_left)
    return queries, kv_head * GROUP + lines % GROUP, is_line
