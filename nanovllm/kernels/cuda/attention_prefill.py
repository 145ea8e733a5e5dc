"""Attention over a paged KV cache for rows of several query tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.attention_splits import (
    MAX_SPLITS,
    Parts,
    allocate_parts,
    find_split,
    join_splits,
    power_of_two_below,
)
from nanovllm.kernels.cuda.attention_tiles import (
    COLUMNS,
    LOG2_E,
    PagedCache,
    attend_head,
    begin_softmax,
    find_blocks,
    head_dims,
    kernel_shape,
    store_softmax,
    strides,
    window_start,
)
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs

MAX_SMALL = (
    2048  # rows of tiles for which small tiles are best, because they occupy more of the device
)
MAX_FEW = 1024  # the same where keys are codes, which every program widens for itself
MIN_SPLIT = 256  # keys that are worth a program of their own
MIN_SPLITS = 4  # fewer gain less than joining them costs
PROGRAMS_PER_SM = 2  # that a multiprocessor should get


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of any number of tokens; all columns are [rows] on the device."""

    slots: Tensor
    query_starts: Tensor  # each row's first token in the batch
    query_lens: Tensor  # its queries: the last tokens of its context; 0 is padding
    context_lens: Tensor  # the keys that its last query attends to
    max_query_len: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    q_rows: int  # queries times query heads per kv head in one program
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs run side by side
    pairs: int = 16  # (row, kv head) pairs that run side by side, so that L2 serves their keys
    min_split: int = MIN_SPLIT


def prefill_config(
    head_dim: int, dtype: torch.dtype, num_q_rows: int, has_codes: bool = False
) -> PrefillConfig:
    """Choose what measured fastest, for up to that many queries times heads per kv head."""
    is_wide = head_dim > 128
    if has_codes and dtype != torch.float32 and not is_wide:
        if num_q_rows <= MAX_FEW:
            return PrefillConfig(q_rows=32, tile=64, num_warps=4, num_stages=3)
        return PrefillConfig(q_rows=128, tile=64, num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return PrefillConfig(q_rows=32, tile=16 if is_wide else 32, num_warps=4, num_stages=2)
    if num_q_rows <= (64 if is_wide else MAX_SMALL):
        return PrefillConfig(q_rows=64, tile=32 if is_wide else 64, num_warps=4, num_stages=3)
    if is_wide:
        return PrefillConfig(q_rows=128, tile=32, num_warps=8, num_stages=3)
    return PrefillConfig(q_rows=128, tile=64, num_warps=8, num_stages=2, max_registers=128)


def with_more_stages(config: PrefillConfig) -> PrefillConfig:
    """On Hopper, which has the memory: a program alone on its processor waits less for keys."""
    is_small = (config.q_rows, config.tile, config.num_warps) == (64, 64, 4)
    return replace(config, num_stages=4) if is_small else config


def choose_prefill_splits(
    num_q_rows: int, num_kv_heads: int, config: PrefillConfig, max_context: int, num_sms: int
) -> int:
    """Into how many programs to split the keys of a kv head's few queries: a power of two."""
    num_programs = triton.cdiv(num_q_rows, config.q_rows) * num_kv_heads
    wanted = PROGRAMS_PER_SM * num_sms // num_programs
    most = min(wanted, MAX_SPLITS, triton.cdiv(max_context, config.min_split))
    return power_of_two_below(most) if most >= MIN_SPLITS else 1


def paged_prefill(
    q: Tensor,  # [tokens, heads, head_dim]; stride(0) is free
    cache: PagedCache,
    rows: PrefillRows,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    scale: float,
    window: int | None,
    num_splits: int = 1,
    config: PrefillConfig | None = None,
) -> None:
    """Attend causally from the last query_lens tokens of each row's context."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // cache.k.shape[2]
    num_q_rows = rows.max_query_len * group
    config = config or prefill_config(head_dim, q.dtype, num_q_rows, cache.has_codes)
    if len(rows.slots) * rows.max_query_len == 0:
        return
    parts = allocate_parts(q, num_tokens, num_splits) if num_splits > 1 else None
    _launch(q, cache, rows, None, out, parts, num_splits, scale, window, config)
    if parts is not None:
        _join_kernel[num_tokens, num_heads](
            *(parts, rows.context_lens, rows.query_starts, rows.query_lens, len(rows.slots), out),
            WINDOW=window,
            HEAD_DIM=head_dim,
            QUERIES=tile_rows(config, group) // group,
            TILE=config.tile,
            SPLITS=num_splits,
            MIN_SPLIT=config.min_split,
            ROWS_PAD=triton.next_power_of_2(len(rows.slots)),
            **launch_options(q, num_tokens),
        )


def attend_shared(
    q: Tensor,  # [rows, heads, head_dim]; stride(0) is free
    cache: PagedCache,
    groups: Tensor,  # [4, groups]: a member's slot, shared keys, index of its first member, members
    members: Tensor,  # the rows of each group
    scale: float,
    config: PrefillConfig | None = None,
) -> Parts:
    """Attend from rows of one token to the keys that they share, which are read once for all.

    Return what `paged_decode` is to begin with.
    """
    num_rows, num_heads, head_dim = q.shape
    num_q_rows = num_rows * num_heads // cache.k.shape[2]
    num_q_rows = min(num_q_rows, MAX_SMALL)
    config = config or prefill_config(head_dim, q.dtype, num_q_rows, cache.has_codes)
    assert groups.is_contiguous()
    slots, context_lens, first_members, num_members = groups.unbind()
    rows = PrefillRows(slots, first_members, num_members, context_lens, num_rows)
    parts = allocate_parts(q, num_rows, 1)
    _launch(q, cache, rows, members, None, parts, 1, scale, None, config)
    return parts


def tile_rows(config: PrefillConfig, group: int) -> int:
    """Rows of a program's tile: some queries of every head of a group."""
    return max(config.q_rows, triton.next_power_of_2(group))


def _launch(
    q: Tensor,
    cache: PagedCache,
    rows: PrefillRows,
    members: Tensor | None,
    out: Tensor | None,
    parts: Parts | None,
    num_splits: int,
    scale: float,
    window: int | None,
    config: PrefillConfig,
) -> None:
    num_tokens, num_heads, _ = q.shape
    num_kv_heads = cache.k.shape[2]
    num_q_rows = tile_rows(config, num_heads // num_kv_heads)
    num_tiles = triton.cdiv(rows.max_query_len, num_q_rows * num_kv_heads // num_heads)
    _prefill_kernel[len(rows.slots) * num_kv_heads, num_tiles, num_splits](
        (q, cache.parts, cache.block_table, out),
        *(rows.slots, rows.context_lens, rows.query_starts, rows.query_lens, members),
        *(parts, strides(q, cache), scale * LOG2_E),
        **kernel_shape(q, cache, out, window),
        Q_ROWS=num_q_rows,
        TILE=config.tile,
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
    tensors,
    slots,
    context_lens,
    query_starts,
    query_lens,
    members,
    parts,
    strides,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some queries of one row over one split of their keys, for the heads of one kv head."""
    most_queries: tl.constexpr = Q_ROWS // GROUP
    q, caches, block_table, out = tensors
    row, kv_head, skipped = find_queries(most_queries, KV_HEADS, PAIRS)
    num_queries = tl.load(query_lens + row)
    if not OVERLAP:  # noqa: SIM102 - one is known when compiling, the other is not
        if skipped >= num_queries:
            return
    length = tl.load(context_lens + row)
    lowest = length - num_queries + skipped if members is None else length - 1  # its first query
    highest, first = tl.minimum(lowest + most_queries, length) - 1, window_start(lowest, WINDOW)
    lo, hi = find_split(first, highest + 1, SPLITS, TILE, MIN_SPLIT)
    blocks = block_table + tl.load(slots + row).to(tl.int64) * strides[1]
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    wait_for_inputs(OVERLAP)  # before any return: a grid that all return from would not have waited
    if skipped >= num_queries:
        return
    dims = head_dims(HEAD_DIM)
    queries, heads, is_row = find_rows(kv_head, num_queries - skipped, GROUP, Q_ROWS)
    tokens = tl.load(query_starts + row).to(tl.int64) + skipped + queries
    if members is not None:
        tokens = tl.load(members + tokens, mask=is_row, other=0).to(tl.int64)
    q_offsets = (tokens * strides[0] + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q + q_offsets, mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    positions = tl.minimum(lowest + queries, highest)
    seen = window_start(positions, WINDOW), positions
    seen_by_all = window_start(highest, WINDOW), lowest + 1
    softmax = attend_head(
        begin_softmax(Q_ROWS, HEAD_DIM),
        *(q_tile, caches, kv_head, blocks, block_ids, length, (lo, hi, first)),
        *(seen_by_all, seen, strides[2], scale),
        *(WINDOW, HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, True),
    )
    if SPLITS > 1:
        is_row = is_row & (lo < hi)
    out_rows = tokens * (KV_HEADS * GROUP) + heads
    store_softmax(out, parts, out_rows, dims, softmax, is_row, HEAD_DIM, SPLITS)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _join_kernel(  # type: ignore[no-untyped-def]
    parts,
    context_lens,
    query_starts,
    query_lens,
    num_rows,
    out,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the splits of one head of a token, if the token is one of a row's queries."""
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
    first, end = window_start(lowest, WINDOW), tl.minimum(lowest + QUERIES, length)
    out_row, dims = token.to(tl.int64) * num_heads + head, head_dims(HEAD_DIM)
    values = join_splits(*(parts, out_row, dims, first, end, HEAD_DIM, SPLITS, TILE, MIN_SPLIT))
    offsets = out_row * HEAD_DIM + dims
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


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
def find_rows(kv_head, num_left, GROUP: tl.constexpr, Q_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the query and the head of every row of a tile, and whether there is such a query."""
    rows = tl.arange(0, Q_ROWS)
    queries = rows // GROUP
    is_row = (queries < Q_ROWS // GROUP) & (queries < num_left)
    return queries, kv_head * GROUP + rows % GROUP, is_row
