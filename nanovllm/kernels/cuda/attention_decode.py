"""Attention over a paged KV cache for rows of one query token."""

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
    MIN_LINES,
    attend_tiles,
    begin_softmax,
    find_blocks,
    kernel_shape,
    store_softmax,
    window_start,
)
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs

MIN_SPLIT = 64  # keys that are worth a program of their own
PROGRAMS_PER_SM = 5  # decode programs that a multiprocessor should get
SHORT_CONTEXT = 512  # keys, up to which a second split gains less than joining both costs


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    min_split: int = MIN_SPLIT


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    if dtype == torch.float32:  # without tensor cores, small tiles save registers
        return DecodeConfig(tile=16, num_warps=4, num_stages=3)
    return DecodeConfig(tile=32, num_warps=4 if head_dim > 128 else 2, num_stages=4)


def choose_splits(num_rows: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Into how many programs to split a row's context to fill the device: a power of two.

    Where whole contexts nearly fill it, two splits still end more evenly than one.
    """
    num_pairs = max(1, num_rows * num_kv_heads)
    if num_pairs >= num_sms and max_context <= SHORT_CONTEXT:
        return 1
    wanted = PROGRAMS_PER_SM * num_sms // num_pairs
    if num_pairs < PROGRAMS_PER_SM * num_sms:
        wanted = max(wanted, 2)
    most = max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_context, MIN_SPLIT)))
    return power_of_two_below(most)


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
    shared_lens: Tensor | None = None,  # [rows], keys that `shared` has, fewer than there are
    shared: Tensor | None = None,  # float32: what `attend_shared` found, for q's tokens
    config: DecodeConfig | None = None,
) -> None:
    """Attend from the last token of each row's context (none: zeros), also inside a CUDA graph."""
    assert shared is None or (window is None and query_index is None)
    num_rows, num_heads, head_dim = slots.shape[0], *q.shape[1:]
    config = config or decode_config(head_dim, q.dtype)
    assert config.min_split % config.tile == 0
    size = partial_size(num_rows, num_heads, head_dim, num_splits)
    assert size == 0 or (partial is not None and partial.numel() >= size)
    shape = kernel_shape(q, k_cache, v_cache, block_table, out, window)
    split = {"TILE": config.tile, "SPLITS": num_splits, "MIN_SPLIT": config.min_split}
    num_kv_heads = k_cache.shape[2]
    if num_rows == 0:
        return
    _decode_kernel[num_kv_heads, num_rows, num_splits](
        *(q, k_cache, v_cache, block_table, slots, context_lens, query_index, order, out, partial),
        *(shared_lens, shared),
        *(scale * LOG2_E, q.stride(0), block_table.stride(0), k_cache.stride(0)),
        **(shape | split),
        LINES=max(MIN_LINES, triton.next_power_of_2(num_heads // num_kv_heads)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q, len(q)),
    )
    if num_splits > 1:
        _combine_kernel[num_rows, num_heads](
            *(partial, context_lens, shared_lens, query_index, out),
            **split,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            **{name: shape[name] for name in ("WINDOW", "HEAD_DIM", "DIM_PAD")},
            **launch_options(q, len(q)),
        )


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    block_table,
    slots,
    context_lens,
    query_index,
    order,
    out,
    partial,
    shared_lens,
    shared,
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
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One query over one split of its row's keys, for the heads of one kv head."""
    row, kv_head = tl.program_id(1), tl.program_id(0)
    if order is not None:
        row = tl.load(order + row)
    length = tl.load(context_lens + row)
    first = _first_key(length, shared_lens, row, WINDOW)
    lo, hi = first // TILE * TILE, length
    if SPLITS > 1:
        size = split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
        lo += tl.program_id(2) * size
        hi = tl.minimum(lo + size, hi)
    token = _token_of(query_index, row)
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    wait_for_inputs(OVERLAP)
    if SPLITS > 1:  # noqa: SIM102 - one is known when compiling, the other is not
        if lo >= hi:
            return
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM_PAD)
    is_real = (lines < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + lines
    q += token * q_stride
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    q_tile = tl.load(q + (heads * HEAD_DIM)[:, None] + dims, mask=is_real, other=0.0)
    if shared is None:
        acc, line_max, line_sum = begin_softmax(LINES, DIM_PAD)
    else:
        places, num_places = row * KV_HEADS * GROUP + heads, tl.num_programs(1) * KV_HEADS * GROUP
        is_begun = (lines < GROUP) & (first > 0) & (tl.program_id(2) == 0)
        acc, line_max, line_sum = load_part(shared, places, num_places, dims, is_begun, HEAD_DIM)
    acc, line_max, line_sum, _ = attend_tiles(
        *(acc, line_max, line_sum, q_tile, k_cache, v_cache, blocks, block_ids, length, dims),
        *(lo, hi, first, hi, first, hi, first + 0 * lines, hi - 1 + 0 * lines, block_stride, scale),
        *(HEAD_DIM, KV_HEADS * HEAD_DIM, BLOCK_SIZE, TILE, False),
    )
    if SPLITS == 1:
        line_sum = tl.where(line_sum == 0.0, 1.0, line_sum)  # a row without context: zeros
        out_lines = token * (KV_HEADS * GROUP) + heads
        store_softmax(out, out_lines, dims, acc, line_sum, is_real, HEAD_DIM)
    else:
        places = (row * KV_HEADS * GROUP + heads) * SPLITS + tl.program_id(2)
        num_places = tl.num_programs(1) * KV_HEADS * GROUP * SPLITS
        is_line = lines < GROUP
        store_part(partial, places, num_places, dims, acc, line_max, line_sum, is_line, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial,
    context_lens,
    shared_lens,
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
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(context_lens + row)
    wait_for_inputs(OVERLAP)
    lo = _first_key(length, shared_lens, row, WINDOW) // TILE * TILE
    size = split_size(length - lo, SPLITS, TILE, MIN_SPLIT)
    splits, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    is_used = (splits < SPLITS) & (lo + splits * size < length)
    places = (row * num_heads + head) * SPLITS + splits
    num_places = tl.num_programs(0) * num_heads * SPLITS
    acc, maxima, sums = load_part(partial, places, num_places, dims, is_used, HEAD_DIM)
    values = join_parts(acc, maxima, sums).to(out.dtype.element_ty)
    out_row = _token_of(query_index, row) * num_heads + head
    tl.store(out + out_row * HEAD_DIM + dims, values, mask=dims < HEAD_DIM)


@triton.jit
def _first_key(length, shared_lens, row, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that is left to attend to."""
    return window_start(length - 1, WINDOW) if shared_lens is None else tl.load(shared_lens + row)


@triton.jit
def _token_of(query_index, row):  # type: ignore[no-untyped-def]
    return (row if query_index is None else tl.load(query_index + row)).to(tl.int64)
