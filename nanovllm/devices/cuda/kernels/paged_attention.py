"""Attention over a paged KV cache: one kernel for decode, prefill and shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.attention.backend import AttentionSpec
from nanovllm.devices.cuda.kernels.attention_configs import AttentionConfig
from nanovllm.devices.cuda.kernels.attention_tiles import (
    PagedCache,
    Partials,
    allocate_partials,
    attend_keys,
    attend_keys_by_tma,
    find_blocks,
    find_split,
    head_dims,
    load_partials,
    split_size,
    store_partials,
    window_start,
)
from nanovllm.devices.cuda.kernels.fp8_rows import WEIGHT_EXPONENT
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs

FP8_WEIGHT = tl.constexpr(2.0**WEIGHT_EXPONENT.value)  # scale of probabilities with an FP8 cache
LOG2_E = 1.4426950408889634  # the softmax uses base 2, for which the hardware has an instruction
SCORE_FACTOR = tl.constexpr(LOG2_E)
# These arguments are slices of an upload, or one group's part of a table: specializing on alignment
# would compile more kernels.
COLUMNS = (
    *("block_table", "slots", "context_lens", "query_starts", "query_lens", "order"),
    *("members", "shared_lens"),
)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The queries of a batch's rows; all columns are device tensors [rows]."""

    slots: Tensor
    context_lens: Tensor  # tokens up to and including the last query; 0: padding
    query_starts: Tensor | None = None  # token index of each row's first query; None: row index
    query_lens: Tensor | None = None  # queries per row (the last tokens of its context); None: 1
    max_query_len: int = 1
    order: Tensor | None = None  # order in which decode rows start; longest context first is best


@dataclass(frozen=True, slots=True)
class SharedPartials:
    """The result of `attend_shared`, from which the softmax of decode rows continues."""

    lens: Tensor  # [rows], number of shared keys; smaller than the context length
    partials: Partials


def paged_attention(
    q: Tensor,  # [tokens, heads, head_dim], with any stride(0)
    cache: PagedCache,
    rows: QueryRows,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    spec: AttentionSpec,
    config: AttentionConfig,
    num_splits: int = 1,  # a power of two
    shared: SharedPartials | None = None,
) -> None:
    """Write the causal attention of each row's queries to `out`.

    The queries are the last tokens of the row's context. The output of padding rows is set to zero,
    or left unwritten if `query_lens` is given.
    """
    assert shared is None or (spec.window is None and rows.query_starts is None)
    assert shared is None or spec.sinks is None
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert num_splits == 1 or config.min_split % config.tile == 0
    num_rows, has_prompts = len(rows.slots), rows.query_lens is not None
    if num_rows * rows.max_query_len == 0:
        return
    num_partial_rows = len(q) if has_prompts else num_rows
    partials = allocate_partials(q, num_partial_rows, num_splits) if num_splits > 1 else None
    _launch(q, cache, rows, None, shared, out, partials, num_splits, spec, config)
    if partials is not None:
        group = q.shape[1] // cache.k.shape[2]
        _merge_kernel[num_partial_rows, q.shape[1]](
            *(partials, rows.context_lens, None if shared is None else shared.lens),
            *(rows.query_starts, rows.query_lens, num_rows if has_prompts else None, out),
            WINDOW=spec.window,
            HEAD_DIM=q.shape[2],
            QUERIES=_tile_rows(config, group) // group,
            TILE=config.tile,
            SPLITS=num_splits,
            MIN_SPLIT=config.min_split,
            ROWS_PAD=triton.next_power_of_2(num_rows) if has_prompts else 0,
            **launch_options(q, len(q)),
        )


def attend_shared(
    q: Tensor,  # [rows, heads, head_dim], with any stride(0)
    cache: PagedCache,
    groups: Tensor,  # [4, groups], as in SharedRows
    members: Tensor,  # rows of each group, concatenated
    spec: AttentionSpec,
    config: AttentionConfig,
) -> Partials:
    """Attend from decode rows to the keys that they share, which are read once per group."""
    assert spec.window is None
    assert groups.is_contiguous()
    slots, context_lens, first_members, num_members = groups.unbind()
    rows = QueryRows(slots, context_lens, first_members, num_members, len(q))
    partials = allocate_partials(q, len(q), 1)
    _launch(q, cache, rows, members, None, None, partials, 1, spec, config)
    return partials


def _launch(
    q: Tensor,
    cache: PagedCache,
    rows: QueryRows,
    members: Tensor | None,
    shared: SharedPartials | None,
    out: Tensor | None,
    partials: Partials | None,
    num_splits: int,
    spec: AttentionSpec,
    config: AttentionConfig,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.k.shape[1:3]
    _check_layout(q, cache)
    num_q_rows = _tile_rows(config, num_heads // num_kv_heads)
    num_tiles = triton.cdiv(rows.max_query_len, num_q_rows * num_kv_heads // num_heads)
    described = _describe(cache.k, config), _describe(cache.v, config)
    _attention_kernel[len(rows.slots) * num_kv_heads, num_tiles, num_splits](
        *(q, cache.parts, *described, cache.block_table, out),
        *(rows.slots, rows.context_lens, rows.query_starts, rows.query_lens, rows.order, members),
        *((None, None) if shared is None else (shared.lens, shared.partials)),
        *(spec.sinks, partials, q.stride(0), cache.block_table.stride(0), cache.parts[0].stride(0)),
        spec.scale * LOG2_E,
        SOFTCAP=None if spec.softcap is None else spec.softcap * LOG2_E,
        WINDOW=spec.window,
        GROUP=num_heads // num_kv_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
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


def _check_layout(q: Tensor, cache: PagedCache) -> None:
    """Check the kernel's assumptions about shapes and strides."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = cache.k.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert block_size % 16 == 0
    assert q.stride()[1:] == (head_dim, 1)
    assert cache.k.stride() == cache.v.stride()
    assert cache.k.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    assert cache.block_table.stride(1) == 1
    for part in cache.exponents:
        assert part.is_contiguous()
        assert part.shape == (len(cache.k), num_kv_heads, block_size)


def _tile_rows(config: AttentionConfig, group: int) -> int:
    """Return the number of rows of a query tile, which has at least one row per head of a group."""
    return max(config.q_rows, triton.next_power_of_2(group))


def _describe(cache: Tensor, config: AttentionConfig) -> TensorDescriptor | None:
    """Return the TMA descriptor of a cache, as a matrix with a row per token.

    The blocks of a layer are strided, so the matrix also spans the rows between them.
    """
    if not config.has_tma:
        return None
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    width = num_kv_heads * head_dim
    assert block_size % config.tile == cache.stride(0) % width == 0
    num_rows = (num_blocks - 1) * (cache.stride(0) // width) + block_size
    return TensorDescriptor(cache, [num_rows, width], [width, 1], [config.tile, head_dim])


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    caches,
    k_rows,
    v_rows,
    block_table,
    out,
    slots,
    context_lens,
    query_starts,
    query_lens,
    order,
    members,
    shared_lens,
    shared,
    sinks,
    partials,
    q_stride,
    table_stride,
    block_stride,
    scale,
    SOFTCAP: tl.constexpr,
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
    """Compute the attention of a query tile (one row, one KV head) over one split of the keys."""
    most_queries: tl.constexpr = Q_ROWS // GROUP
    if query_lens is None:
        row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
        num_queries, skipped = 1, 0
        if order is not None:
            row = tl.load(order + row)
    else:
        row, kv_head, skipped = _find_queries(most_queries, KV_HEADS, PAIRS)
        num_queries = tl.load(query_lens + row)
    if not OVERLAP:  # noqa: SIM102 - this condition is known at compile time
        if skipped >= num_queries:
            return
    length = tl.load(context_lens + row)
    # Position of the first query. A shared prefix needs no mask: all queries attend to all keys.
    lowest = length - num_queries + skipped if members is None else length - 1
    highest = tl.minimum(lowest + most_queries, length) - 1
    first = window_start(lowest, WINDOW) if shared_lens is None else tl.load(shared_lens + row)
    lo, hi = find_split(first, highest + 1, SPLITS, TILE, MIN_SPLIT)
    token = (row if query_starts is None else tl.load(query_starts + row)).to(tl.int64) + skipped
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    wait_for_inputs(OVERLAP)  # before any early return: every CTA must wait
    if skipped >= num_queries:
        return
    if SPLITS > 1:  # noqa: SIM102
        if lo >= hi:
            return
    rows, dims = tl.arange(0, Q_ROWS), head_dims(HEAD_DIM)
    if query_lens is None:
        queries, heads, is_row = 0 * rows, kv_head * GROUP + rows, rows < GROUP
    else:
        queries, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
        is_row = (queries < most_queries) & (queries < num_queries - skipped)
    if members is None:
        q_offsets = token * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None]
    else:
        tokens = tl.load(members + token + queries, mask=is_row, other=0).to(tl.int64)
        q_offsets = (tokens * q_stride + heads * HEAD_DIM)[:, None]
    is_real = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + q_offsets + dims, mask=is_real, other=0.0)
    if shared is None:
        row_max = tl.full((Q_ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((Q_ROWS,), tl.float32)
        if sinks is not None:  # a sink acts as an extra key in the first split, with value zero
            is_first = is_row & (tl.program_id(2) == 0) & (length > 0)
            row_max = tl.load(sinks + heads, mask=is_first, other=float("-inf")).to(tl.float32)
            row_max *= SCORE_FACTOR
            row_sum = tl.where(is_first, 1.0 if len(caches) == 2 else FP8_WEIGHT, 0.0)
        softmax = tl.zeros((Q_ROWS, dims.shape[0]), tl.float32), row_max, row_sum
    else:
        is_begun = is_row & (first > 0) & (tl.program_id(2) == 0)
        softmax = load_partials(shared, row * KV_HEADS * GROUP + heads, dims, is_begun, HEAD_DIM)
    if k_rows is not None:
        tl.static_assert(SOFTCAP is None)
        softmax = attend_keys_by_tma(
            *(softmax, q_tile, k_rows, v_rows, blocks, kv_head * HEAD_DIM, lowest + queries),
            *(lowest, highest, length, block_stride // (KV_HEADS * HEAD_DIM), scale),
            *(BLOCK_SIZE, TILE),
        )
    else:
        positions = tl.minimum(lowest + queries, highest)
        seen_by_all = window_start(highest, WINDOW), lowest + 1
        seen = window_start(positions, WINDOW), positions
        if shared_lens is not None:
            seen_by_all, seen = (first, lowest + 1), (first + 0 * positions, positions)
        softmax = attend_keys(
            *(softmax, q_tile, caches, kv_head, blocks, block_ids, length, (lo, hi, first)),
            *(seen_by_all, seen, block_stride, scale),
            *(SOFTCAP, WINDOW, HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, query_lens is not None),
        )
    if members is None:
        tokens = token + queries
    if partials is None:
        acc, _, row_sum = softmax
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # padding and empty contexts give zeros
        values = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        out_rows = tokens * (KV_HEADS * GROUP) + heads
        tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], values, mask=is_real)
    else:
        # Partial results of decode rows are indexed by row: their tokens may be far apart.
        partial_rows = (tokens if query_lens is not None else row) * (KV_HEADS * GROUP) + heads
        store_partials(
            partials, partial_rows * SPLITS + tl.program_id(2), dims, softmax, is_row, HEAD_DIM
        )


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _merge_kernel(  # type: ignore[no-untyped-def]
    partials,
    context_lens,
    shared_lens,
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
    """Merge the splits of one head of a row or, with query_lens, of a token."""
    index, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = index
    if query_lens is None:
        length = tl.load(context_lens + index)
        lowest = length - 1
        if query_starts is not None:
            token = tl.load(query_starts + index)
        wait_for_inputs(OVERLAP)
    else:
        rows = tl.arange(0, ROWS_PAD)
        counts = tl.load(query_lens + rows, mask=rows < num_rows, other=0)
        queries = token - tl.load(query_starts + rows, mask=rows < num_rows, other=0)
        lengths = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
        is_row = (queries >= 0) & (queries < counts)
        length = tl.sum(tl.where(is_row, lengths, 0), 0)
        # Position of the first query of this token's tile: it determines how the keys were split.
        lowest = lengths - counts + queries // QUERIES * QUERIES
        lowest = tl.sum(tl.where(is_row, lowest, 0), 0)
        wait_for_inputs(OVERLAP)
        if tl.max(is_row.to(tl.int32), 0) == 0:
            return
    first = window_start(lowest, WINDOW) if shared_lens is None else tl.load(shared_lens + index)
    end, dims = tl.minimum(lowest + QUERIES, length), head_dims(HEAD_DIM)
    partial_row = index.to(tl.int64) * num_heads + head
    lo = first // TILE * TILE
    size = split_size(end - lo, SPLITS, TILE, MIN_SPLIT)
    splits = tl.arange(0, SPLITS)
    is_used = lo + splits * size < end  # empty splits stored nothing
    indices = partial_row * SPLITS + splits
    acc, maxima, sums = load_partials(partials, indices, dims, is_used, HEAD_DIM)
    highest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(sums * weights, 0)  # 0 if there are no keys: the output is then 0 as well
    values = tl.sum(acc * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    offsets = (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dims
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _find_queries(  # type: ignore[no-untyped-def]
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr
):
    """Return this CTA's row and KV head, and the index of its first query in the row.

    CTAs process PAIRS pairs of (row, KV head) at a time, so that their keys stay in L2, and start
    with the tiles that have the most keys.
    """
    num_pairs, num_tiles = tl.num_programs(0), tl.num_programs(1)
    index = tl.program_id(1) * num_pairs + tl.program_id(0)
    pair = index // (PAIRS * num_tiles) * PAIRS
    index -= pair * num_tiles
    width = tl.minimum(num_pairs - pair, PAIRS)
    pair += index % width
    return pair // KV_HEADS, pair % KV_HEADS, (num_tiles - 1 - index // width) * QUERIES
