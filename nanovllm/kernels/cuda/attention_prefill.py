"""Attention over a paged KV cache for rows of several query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.attention_splits import (
    MAX_SPLITS,
    join_parts,
    load_part,
    partial_size,
    power_of_two_below,
    split_size,
    store_part,
)
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

MAX_SMALL = 2048  # lines for which small tiles are best, because they occupy more of the device
MIN_SPLIT = 256  # keys that are worth a program of their own
MIN_SPLITS = 4  # fewer gain less than joining them costs
PROGRAMS_PER_SM = 2  # that a multiprocessor should get


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    lines: int  # queries times query heads per kv head in one program
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs run side by side
    pairs: int = 16  # (row, kv head) pairs that run side by side, so that L2 serves their keys
    min_split: int = MIN_SPLIT


def prefill_config(head_dim: int, dtype: torch.dtype, num_lines: int) -> PrefillConfig:
    """Choose what measured fastest, for rows of up to num_lines lines."""
    is_wide = head_dim > 128
    if dtype == torch.float32:
        return PrefillConfig(lines=32, tile=16 if is_wide else 32, num_warps=4, num_stages=2)
    if num_lines <= (64 if is_wide else MAX_SMALL):
        lines = 16 if num_lines <= 16 else 64
        return PrefillConfig(lines, tile=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide:
        return PrefillConfig(lines=128, tile=32, num_warps=8, num_stages=3)
    return PrefillConfig(lines=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def choose_prefill_splits(
    num_lines: int, num_kv_heads: int, config: PrefillConfig, max_context: int, num_sms: int
) -> int:
    """Into how many programs to split the keys of a kv head's few lines: a power of two."""
    num_programs = triton.cdiv(num_lines, config.lines) * num_kv_heads
    wanted = PROGRAMS_PER_SM * num_sms // num_programs
    most = min(wanted, MAX_SPLITS, triton.cdiv(max_context, config.min_split))
    return power_of_two_below(most) if most >= MIN_SPLITS else 1


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
    num_splits: int = 1,
    config: PrefillConfig | None = None,
) -> None:
    """Attend causally from the last query_lens tokens of each row's context."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[2]
    config = config or prefill_config(head_dim, q.dtype, max_query_len * group)
    if len(slots) * max_query_len == 0:
        return
    columns = slots, context_lens, query_starts, query_lens
    partial = None
    if num_splits > 1:
        size = partial_size(num_tokens, num_heads, head_dim, num_splits)
        partial = torch.empty(size, device=q.device, dtype=torch.float32)
    _launch(
        *(q, (k_cache, v_cache), block_table, columns, None, max_query_len),
        *(out, partial, num_splits, scale, window, config),
    )
    if partial is not None:
        _join_kernel[num_tokens, num_heads](
            *(partial, context_lens, query_starts, query_lens, len(slots), out),
            WINDOW=window,
            HEAD_DIM=head_dim,
            DIM_PAD=triton.next_power_of_2(head_dim),
            QUERIES=tile_lines(config, group) // group,
            TILE=config.tile,
            SPLITS=num_splits,
            MIN_SPLIT=config.min_split,
            ROWS_PAD=triton.next_power_of_2(len(slots)),
            **launch_options(q, num_tokens),
        )


def attend_shared(
    q: Tensor,  # [rows, heads, head_dim]; stride(0) is free
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    groups: Tensor,  # [4, groups]: a member's slot, shared keys, first place in members, members
    members: Tensor,  # the rows of each group
    partial: Tensor,  # float32 [rows * heads * (head_dim + 2)]
    scale: float,
    config: PrefillConfig | None = None,
) -> None:
    """Attend from rows of one token to the keys that they share, which are read once for all.

    What `paged_decode` is to begin with is left in `partial`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_lines = num_rows * num_heads // k_cache.shape[2]
    config = config or prefill_config(head_dim, q.dtype, min(num_lines, MAX_SMALL))
    assert groups.is_contiguous()
    columns = tuple(groups.unbind())
    _launch(
        *(q, (k_cache, v_cache), block_table, columns, members, num_rows),
        *(None, partial, 1, scale, None, config),
    )


def tile_lines(config: PrefillConfig, group: int) -> int:
    """Lines of a program: some queries of every head of a group."""
    return max(config.lines, triton.next_power_of_2(group))


def _launch(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_table: Tensor,
    columns: tuple[Tensor, ...],
    members: Tensor | None,
    max_query_len: int,
    out: Tensor | None,
    partial: Tensor | None,
    num_splits: int,
    scale: float,
    window: int | None,
    config: PrefillConfig,
) -> None:
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, block_stride = caches[0].shape[2], caches[0].stride(0)
    num_lines = tile_lines(config, num_heads // num_kv_heads)
    num_queries = num_lines * num_kv_heads // num_heads
    num_tiles = triton.cdiv(max_query_len, num_queries)
    _prefill_kernel[len(columns[0]) * num_kv_heads, num_tiles, num_splits](
        *(q, *caches, block_table, *columns, members, out, partial),
        *(scale * LOG2_E, q.stride(0), block_table.stride(0), block_stride),
        num_tokens * num_heads * num_splits,
        **kernel_shape(q, *caches, block_table, out, window),
        TILE=config.tile,
        QUERIES=num_queries,
        LINES=num_lines,
        PAIRS=config.pairs,
        SPLITS=num_splits,
        MIN_SPLIT=config.min_split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **launch_options(q, num_tokens),
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
    members,
    out,
    partial,
    scale,
    q_stride,
    table_stride,
    block_stride,
    num_places,
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
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """QUERIES queries of one row over one split of their keys, for the heads of one kv head."""
    wait_for_inputs(OVERLAP)  # a grid of programs that all return would not have waited
    row, kv_head, skipped = find_queries(QUERIES, KV_HEADS, PAIRS)
    num_queries = tl.load(query_lens + row)
    if skipped >= num_queries:
        return
    length = tl.load(context_lens + row)
    lowest = length - num_queries + skipped  # position of the first query
    if members is not None:  # of which each is the last token of another row
        lowest = length - 1
    highest = tl.minimum(lowest + QUERIES, length) - 1
    first = window_start(lowest, WINDOW)
    lo, hi = first // TILE * TILE, highest + 1
    if SPLITS > 1:
        size = split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
        lo += tl.program_id(2) * size
        hi = tl.minimum(lo + size, hi)
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    dims = tl.arange(0, DIM_PAD)
    queries, heads, is_line = find_lines(kv_head, num_queries - skipped, QUERIES, GROUP, LINES)
    is_real = is_line[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = tl.load(query_starts + row).to(tl.int64) + skipped + queries
    if members is not None:
        tokens = tl.load(members + tokens, mask=is_line, other=0).to(tl.int64)
    q_places = q + (tokens * q_stride + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q_places, mask=is_real, other=0.0)
    positions = tl.minimum(lowest + queries, highest)
    firsts = window_start(positions, WINDOW)
    acc, line_max, line_sum = begin_softmax(LINES, DIM_PAD)
    full_lo, full_hi = window_start(highest, WINDOW), lowest + 1
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    whole = lo
    if WINDOW is None:  # first the tiles whose keys are all there
        whole = tl.maximum(tl.minimum(tl.cdiv(hi, TILE), length // TILE) * TILE, lo)
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
    out_lines = tokens * (KV_HEADS * GROUP) + heads
    if partial is None:
        line_sum = tl.where(line_sum == 0.0, 1.0, line_sum)  # a line that is padding
        store_softmax(out, out_lines, dims, acc, line_sum, is_real, HEAD_DIM)
    else:
        places = out_lines * SPLITS + tl.program_id(2)
        is_line = is_line & (lo < hi)
        store_part(partial, places, num_places, dims, acc, line_max, line_sum, is_line, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _join_kernel(  # type: ignore[no-untyped-def]
    partial,
    context_lens,
    query_starts,
    query_lens,
    num_rows,
    out,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the splits of one line, if its token is one of a row's queries."""
    token, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, ROWS_PAD)
    counts = tl.load(query_lens + rows, mask=rows < num_rows, other=0)
    index = token - tl.load(query_starts + rows, mask=rows < num_rows, other=0)
    lengths = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    wait_for_inputs(OVERLAP)
    is_row = (index >= 0) & (index < counts)
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    length = tl.sum(tl.where(is_row, lengths, 0), 0)
    # The keys of the program that had this query, and how it split them.
    skipped = index // QUERIES * QUERIES
    lowest = tl.sum(tl.where(is_row, lengths - counts + skipped, 0), 0)
    lo, hi = window_start(lowest, WINDOW) // TILE * TILE, tl.minimum(lowest + QUERIES, length)
    size = split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM_PAD)
    line = token.to(tl.int64) * num_heads + head
    places, num_places = line * SPLITS + splits, tl.num_programs(0) * num_heads * SPLITS
    is_used = lo + splits * size < hi
    acc, maxima, sums = load_part(partial, places, num_places, dims, is_used, HEAD_DIM)
    values = join_parts(acc, maxima, sums).to(out.dtype.element_ty)
    tl.store(out + line * HEAD_DIM + dims, values, mask=dims < HEAD_DIM)


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
