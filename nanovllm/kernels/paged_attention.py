"""Attention over a paged KV cache in Triton, for rows of one query token or of several.

The query heads that share a kv head are lines of one tile, so each key is read once for them all.
Keys outside a row's context or window are never used: their blocks may hold anything, or be gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.overlap import launch_options, wait_for_inputs

LOG2_E = 1.4426950408889634  # the softmax runs in base 2, which the hardware has an instruction for
MIN_LINES = 16  # tl.dot takes no fewer
MIN_SPLIT = 64  # keys that are worth a program of their own
MAX_SPLITS = 32
PROGRAMS_PER_SM = 5  # decode programs that a multiprocessor should get
# They may begin anywhere in an upload: a kernel for every alignment would be compiled anew.
COLUMNS = ("slots", "context_lens", "query_starts", "query_lens", "query_index", "order")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    min_split: int = MIN_SPLIT


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    lines: int  # queries times query heads per kv head in one program
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs run side by side
    pairs: int = 16  # (row, kv head) pairs that run side by side, so that L2 serves their keys


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    if dtype == torch.float32:  # without tensor cores, small tiles save registers
        return DecodeConfig(tile=16, num_warps=4, num_stages=3)
    return DecodeConfig(tile=32, num_warps=4 if head_dim > 128 else 2, num_stages=4)


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


def choose_splits(num_rows: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Into how many programs to split a row's context to fill the device: a power of two.

    Where whole contexts nearly fill it, two splits still end more evenly than one.
    """
    num_pairs = max(1, num_rows * num_kv_heads)
    wanted = PROGRAMS_PER_SM * num_sms // num_pairs
    if num_pairs < PROGRAMS_PER_SM * num_sms:
        wanted = max(wanted, 2)
    most = max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_context, MIN_SPLIT)))
    return 1 << (most.bit_length() - 1)


def partial_size(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Floats that `paged_decode` needs: the output so far of each split, its maximum, its sum."""
    return 0 if num_splits == 1 else num_rows * num_heads * num_splits * (head_dim + 2)


def paged_decode(
    q: Tensor,  # [tokens, heads, head_dim]; stride(0) is free
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]; stride(0) is free
    v_cache: Tensor,
    block_table: Tensor,  # [num_slots, max_blocks]; unused entries may hold anything
    slots: Tensor,  # [rows], each row's line of block_table
    context_lens: Tensor,  # [rows], the keys each row attends to; 0 is padding
    query_index: Tensor | None,  # [rows], each row's token in q and out; None: row i is token i
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    scale: float,
    window: int | None,
    num_splits: int,
    partial: Tensor | None,  # float32 [>= partial_size(...)]; unused when num_splits is 1
    order: Tensor | None = None,  # [rows], the order to start them in: the longest first is best
    config: DecodeConfig | None = None,
) -> None:
    """Attend from the last token of each row's context (none: zeros), also inside a CUDA graph."""
    num_rows, num_heads, head_dim = slots.shape[0], *q.shape[1:]
    config = config or decode_config(head_dim, q.dtype)
    assert config.min_split % config.tile == 0
    size = partial_size(num_rows, num_heads, head_dim, num_splits)
    assert size == 0 or (partial is not None and partial.numel() >= size)
    shape = kernel_shape(q, k_cache, v_cache, block_table, out, window)
    split = {"TILE": config.tile, "SPLITS": num_splits, "MIN_SPLIT": config.min_split}
    if num_rows == 0:
        return
    _attention_kernel[k_cache.shape[2], num_rows, num_splits](
        *(q, k_cache, v_cache, block_table, slots, context_lens, query_index, None, order),
        *(out, partial, scale * LOG2_E, q.stride(0), block_table.stride(0), k_cache.stride(0)),
        **(shape | split),
        QUERIES=1,
        LINES=max(MIN_LINES, triton.next_power_of_2(num_heads // k_cache.shape[2])),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q, len(q)),
    )
    if num_splits > 1:
        _combine_kernel[num_rows, num_heads](
            *(partial, context_lens, query_index, out),
            **split,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            **{name: shape[name] for name in ("WINDOW", "HEAD_DIM", "DIM_PAD")},
            **launch_options(q, len(q)),
        )


def paged_prefill(
    q: Tensor,  # shapes and strides as for paged_decode
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,  # [rows], each row's first token in q and out
    query_lens: Tensor,  # [rows], its queries: the last tokens of its context; 0 is padding
    context_lens: Tensor,
    max_query_len: int,
    out: Tensor,
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
    _attention_kernel[num_rows * k_cache.shape[2], num_tiles](
        *(q, k_cache, v_cache, block_table, *columns, None, out, None),
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


def kernel_shape(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, out: Tensor, window: int | None
) -> dict[str, int | None]:
    """Collect what a kernel is compiled for, and check the layouts that it takes for granted."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert block_size % 16 == 0
    assert q.stride()[1:] == (head_dim, 1)
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1)
    assert table.stride(1) == 1
    sizes = {"GROUP": num_heads // num_kv_heads, "KV_HEADS": num_kv_heads, "BLOCK_SIZE": block_size}
    padded = triton.next_power_of_2(head_dim)
    return {"WINDOW": window, "HEAD_DIM": head_dim, "DIM_PAD": padded, **sizes}


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    block_table,
    slots,
    context_lens,
    query_starts,
    query_lens,
    order,
    out,
    partial,
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
    OVERLAP: tl.constexpr,
    SPLITS: tl.constexpr = 1,
    MIN_SPLIT: tl.constexpr = None,
    PAIRS: tl.constexpr = None,
):
    """QUERIES queries of one row over one split of its keys, for the heads of one kv head."""
    if query_lens is None:  # decode: one query per row
        row, kv_head, skipped, num_queries = tl.program_id(1), tl.program_id(0), 0, 1
        if order is not None:
            row = tl.load(order + row)
    else:
        wait_for_inputs(OVERLAP)  # a grid of programs that all return would not have waited
        pair, tile = tile_order(PAIRS)
        row, kv_head, skipped = pair // KV_HEADS, pair % KV_HEADS, tile * QUERIES
        num_queries = tl.load(query_lens + row)
        if skipped >= num_queries:
            return
    length = tl.load(context_lens + row)
    lowest = length - num_queries + skipped  # position of the first query
    highest = tl.minimum(lowest + QUERIES, length) - 1
    first = _window_start(lowest, WINDOW)
    lo, hi = first // TILE * TILE, highest + 1
    if SPLITS > 1:
        split_size = _split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
        lo += tl.program_id(2) * split_size
        hi = tl.minimum(lo + split_size, hi)

    token = _token_of(query_starts, row) + skipped
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    # Block ids are loaded a step ahead: a load that waits for another would end the pipelining.
    block_ids = _block_ids(blocks, lo, length, BLOCK_SIZE, TILE)
    if query_lens is None:
        wait_for_inputs(OVERLAP)
    if SPLITS > 1:  # noqa: SIM102 - one is known when compiling, the other is not
        if lo >= hi:
            return
    lines = tl.arange(0, LINES)
    dims = tl.arange(0, DIM_PAD)
    queries = lines // GROUP
    heads = kv_head * GROUP + lines % GROUP
    is_line = (queries < QUERIES) & (queries < num_queries - skipped)
    is_dim = dims < HEAD_DIM
    is_real = is_line[:, None] & is_dim[None, :]
    q_places = q + token * q_stride + (queries * q_stride + heads * HEAD_DIM)[:, None] + dims
    q_tile = tl.load(q_places, mask=is_real, other=0.0)
    positions = lowest + queries
    acc = tl.zeros((LINES, DIM_PAD), tl.float32)
    line_max = tl.full((LINES,), float("-inf"), tl.float32)
    line_sum = tl.zeros((LINES,), tl.float32)
    # Every query sees the keys full_lo .. full_hi: only tiles that reach beyond them need a mask.
    full_lo, full_hi = _window_start(highest, WINDOW), lowest + 1
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    whole = lo
    if QUERIES > 1 and WINDOW is None:  # first the tiles whose keys are all there
        whole = tl.minimum(tl.cdiv(hi, TILE), length // TILE) * TILE
        for tile_start in tl.range(lo, whole, TILE):
            keys = tile_start + tl.arange(0, TILE)
            places = block_ids * block_stride + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
            block_ids = _block_ids(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
            is_partial = tile_start + TILE > full_hi
            acc, line_max, line_sum = _attend_tile(
                *(acc, line_max, line_sum, q_tile, k_cache, v_cache, places, dims),
                *(keys, None, positions, is_partial, scale, WINDOW, HEAD_DIM),
            )
    for tile_start in tl.range(whole, hi, TILE):
        keys = tile_start + tl.arange(0, TILE)
        is_key = (keys >= first) & (keys <= highest)
        places = block_ids * block_stride + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        block_ids = _block_ids(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
        is_partial = (tile_start < full_lo) | (tile_start + TILE > full_hi)
        acc, line_max, line_sum = _attend_tile(
            *(acc, line_max, line_sum, q_tile, k_cache, v_cache, places, dims),
            *(keys, is_key, positions, is_partial, scale, WINDOW, HEAD_DIM),
        )

    if SPLITS == 1:
        line_sum = tl.where(line_sum == 0.0, 1.0, line_sum)  # a row without context: zeros
        values = (acc / line_sum[:, None]).to(out.dtype.element_ty)
        out_lines = (token + queries) * (KV_HEADS * GROUP) + heads
        tl.store(out + out_lines[:, None] * HEAD_DIM + dims[None, :], values, mask=is_real)
    else:
        places = (row * KV_HEADS * GROUP + heads) * SPLITS + tl.program_id(2)
        num_places = tl.num_programs(1) * KV_HEADS * GROUP * SPLITS
        tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_real)
        tl.store(partial + num_places * HEAD_DIM + places, line_max, mask=is_line)
        tl.store(partial + num_places * (HEAD_DIM + 1) + places, line_sum, mask=is_line)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial,
    context_lens,
    query_index,
    out,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the splits of one query head; those that got no keys wrote nothing."""
    wait_for_inputs(OVERLAP)
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(context_lens + row)
    lo = _window_start(length - 1, WINDOW) // TILE * TILE
    split_size = _split_size(length - lo, SPLITS, TILE, MIN_SPLIT)
    splits = tl.arange(0, SPLITS_PAD)
    is_used = (splits < SPLITS) & (lo + splits * split_size < length)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < HEAD_DIM
    places = (row * num_heads + head) * SPLITS + splits
    num_places = tl.num_programs(0) * num_heads * SPLITS
    acc_places = partial + places[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.load(acc_places, mask=is_used[:, None] & is_dim[None, :], other=0.0)
    maxima = tl.load(partial + num_places * HEAD_DIM + places, mask=is_used, other=float("-inf"))
    sums = tl.load(partial + num_places * (HEAD_DIM + 1) + places, mask=is_used, other=0.0)
    weights = tl.where(is_used, tl.exp2(maxima - tl.max(maxima, 0)), 0.0)
    total = tl.where(length > 0, tl.sum(sums * weights, 0), 1.0)
    values = (tl.sum(acc * weights[:, None], 0) / total).to(out.dtype.element_ty)
    out_row = _token_of(query_index, row) * num_heads + head
    tl.store(out + out_row * HEAD_DIM + dims, values, mask=is_dim)


@triton.jit
def _load_tile(heads, places, dims, is_key, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load keys or values [TILE, DIM_PAD]; what is not a key is zeros, whatever is there."""
    tile = heads + (places[:, None] + dims[None, :])
    is_dim = (dims < HEAD_DIM)[None, :]
    if is_key is not None:
        values = tl.load(tile, mask=is_key[:, None] & is_dim, other=0.0)
    elif dims.shape[0] != HEAD_DIM:
        values = tl.load(tile, mask=is_dim, other=0.0)
    else:
        values = tl.load(tile)
    return values


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    acc,
    line_max,
    line_sum,
    q_tile,
    k_cache,
    v_cache,
    places,
    dims,
    keys,
    is_key,
    positions,
    is_partial,
    scale,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Take a tile of keys and values into the softmax so far."""
    k = _load_tile(k_cache, places, dims, is_key, HEAD_DIM)
    scores = tl.dot(q_tile, k.T, input_precision="ieee")
    if is_partial:
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW is not None:
            is_seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, alpha, line_max, line_sum = weigh(scores, line_max, line_sum, scale)
    v = _load_tile(v_cache, places, dims, is_key, HEAD_DIM)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, line_max, line_sum


@triton.jit
def weigh(scores, line_max, line_sum, scale):  # type: ignore[no-untyped-def]
    """Return a tile's weights, the factor for what came before, and the new maximum and sum."""
    new_max = tl.maximum(line_max, tl.max(scores, 1) * scale)
    # A line that has seen nothing yet: -inf minus -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(line_max - shift)
    return weights, alpha, new_max, line_sum * alpha + tl.sum(weights, 1)


@triton.jit
def tile_order(PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take PAIRS pairs at a time, so that L2 serves their keys, and their longest tiles first."""
    num_pairs, num_tiles = tl.num_programs(0), tl.num_programs(1)
    index = tl.program_id(1) * num_pairs + tl.program_id(0)
    pair = index // (PAIRS * num_tiles) * PAIRS
    index -= pair * num_tiles
    width = tl.minimum(num_pairs - pair, PAIRS)
    return pair + index % width, num_tiles - 1 - index // width


@triton.jit
def _window_start(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a query at a position sees."""
    return position * 0 if WINDOW is None else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def _split_size(  # type: ignore[no-untyped-def]
    num_keys, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Keys per split, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), TILE) * TILE, MIN_SPLIT)


@triton.jit
def _token_of(query_starts, row):  # type: ignore[no-untyped-def]
    return (row if query_starts is None else tl.load(query_starts + row)).to(tl.int64)


@triton.jit
def _block_ids(  # type: ignore[no-untyped-def]
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
