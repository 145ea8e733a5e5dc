"""Attention over a paged KV cache for rows of one query token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.base import Turn
from nanovllm.kernels.overlap import launch_options, wait_for_inputs
from nanovllm.kernels.paged_tiles import (
    COLUMNS,
    LOG2_E,
    MIN_LINES,
    attend_tile,
    find_blocks,
    kernel_shape,
    window_start,
)

MIN_SPLIT = 64  # keys that are worth a program of their own
MAX_SPLITS = 32
PROGRAMS_PER_SM = 5  # decode programs that a multiprocessor should get


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
    turn: Turn | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attend from the last token of each row's context (none: zeros), also inside a CUDA graph.

    With `turn`, q is the first heads of qkv as they were projected: its heads and the keys behind
    them are normalised and turned here, and the row's key and value stored. The cache must have no
    part in this launch but that: a row may not read what another one stores.
    """
    num_rows, num_heads, head_dim = slots.shape[0], *q.shape[1:]
    config = config or decode_config(head_dim, q.dtype)
    assert config.min_split % config.tile == 0
    size = partial_size(num_rows, num_heads, head_dim, num_splits)
    assert size == 0 or (partial is not None and partial.numel() >= size)
    shape = kernel_shape(q, k_cache, v_cache, block_table, out, window)
    split = {"TILE": config.tile, "SPLITS": num_splits, "MIN_SPLIT": config.min_split}
    num_kv_heads = k_cache.shape[2]
    assert turn is None or q.stride(0) == (num_heads + 2 * num_kv_heads) * head_dim
    norm = None if turn is None else turn.norm
    weights = (None, None, None) if norm is None else (norm.q, norm.k, norm.eps)
    if num_rows == 0:
        return
    _decode_kernel[num_kv_heads, num_rows, num_splits](
        *(q, k_cache, v_cache, block_table, slots, context_lens, query_index, order, out, partial),
        *(*weights, None if turn is None else turn.rope),
        *(scale * LOG2_E, q.stride(0), block_table.stride(0), k_cache.stride(0)),
        **(shape | split),
        LINES=max(
            MIN_LINES, triton.next_power_of_2(num_heads // num_kv_heads + (turn is not None))
        ),
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
    q_norm,
    k_norm,
    eps,
    rope,
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
    position = length - 1
    first = window_start(position, WINDOW)
    lo, hi = first // TILE * TILE, length
    if SPLITS > 1:
        split_size = _split_size(hi - lo, SPLITS, TILE, MIN_SPLIT)
        lo += tl.program_id(2) * split_size
        hi = tl.minimum(lo + split_size, hi)
    token = _token_of(query_index, row)
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    # Block ids are loaded a step ahead: a load that waits for another would end the pipelining.
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    dims = tl.arange(0, DIM_PAD)
    if rope is not None:
        cos, sin = _load_turn(rope, position, dims, HEAD_DIM)
    wait_for_inputs(OVERLAP)
    if SPLITS > 1:  # noqa: SIM102 - one is known when compiling, the other is not
        if lo >= hi:
            return
    lines = tl.arange(0, LINES)
    is_real = (lines < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + lines
    q += token * q_stride
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    num_cached = hi
    if rope is None:
        q_tile = tl.load(q + (heads * HEAD_DIM)[:, None] + dims, mask=is_real, other=0.0)
    else:  # the newest key is not in the cache yet: it is turned as the line after the queries
        k_head = KV_HEADS * GROUP + kv_head
        turned = q + (tl.where(lines < GROUP, heads, k_head) * HEAD_DIM)[:, None]
        q_tile = _load_turned(turned, dims, lines, q_norm, k_norm, eps, cos, sin, GROUP, HEAD_DIM)
        k = tl.sum(tl.where((lines == GROUP)[:, None], q_tile.to(tl.float32), 0.0), 0)
        has_newest = (hi >= length) & (length > 0)
        is_newest = dims < tl.where(has_newest, HEAD_DIM, 0)
        v = tl.load(q + (k_head + KV_HEADS) * HEAD_DIM + dims, mask=is_newest, other=0.0)
        newest = find_blocks(blocks, tl.maximum(position, 0), length, BLOCK_SIZE, 1) * block_stride
        newest += position % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        tl.store(k_cache + newest + dims, k.to(q_tile.dtype), mask=is_newest)
        tl.store(v_cache + newest + dims, v, mask=is_newest)
        num_cached = tl.minimum(hi, position)
    acc = tl.zeros((LINES, DIM_PAD), tl.float32)
    line_max = tl.full((LINES,), float("-inf"), tl.float32)
    line_sum = tl.zeros((LINES,), tl.float32)
    for tile_start in tl.range(lo, num_cached, TILE):
        keys = tile_start + tl.arange(0, TILE)
        is_key = (keys >= first) & (keys < num_cached)
        places = block_ids * block_stride + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        block_ids = find_blocks(blocks, tile_start + TILE, length, BLOCK_SIZE, TILE)
        is_partial = (tile_start < first) | (tile_start + TILE > num_cached)
        acc, line_max, line_sum = attend_tile(
            *(acc, line_max, line_sum, q_tile, k_cache, v_cache, places, dims, keys, is_key),
            *(first + 0 * lines, num_cached - 1 + 0 * lines, is_partial, scale, HEAD_DIM),
        )
    if rope is not None:
        acc, line_max, line_sum = _attend_newest(
            acc, line_max, line_sum, q_tile, k, v, has_newest, scale
        )
    if SPLITS == 1:
        line_sum = tl.where(line_sum == 0.0, 1.0, line_sum)  # a row without context: zeros
        values = (acc / line_sum[:, None]).to(out.dtype.element_ty)
        out_lines = token * (KV_HEADS * GROUP) + heads
        tl.store(out + out_lines[:, None] * HEAD_DIM + dims[None, :], values, mask=is_real)
    else:
        places = (row * KV_HEADS * GROUP + heads) * SPLITS + tl.program_id(2)
        num_places = tl.num_programs(1) * KV_HEADS * GROUP * SPLITS
        tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_real)
        tl.store(partial + num_places * HEAD_DIM + places, line_max, mask=lines < GROUP)
        tl.store(partial + num_places * (HEAD_DIM + 1) + places, line_sum, mask=lines < GROUP)


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
    lo = window_start(length - 1, WINDOW) // TILE * TILE
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
def _split_size(  # type: ignore[no-untyped-def]
    num_keys, SPLITS: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr
):
    """Keys per split, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), TILE) * TILE, MIN_SPLIT)


@triton.jit
def _attend_newest(  # type: ignore[no-untyped-def]
    acc, line_max, line_sum, q_tile, k, v, has_newest, scale
):
    """Take one key and value into the softmax so far; without tl.dot, which wants many."""
    score = tl.sum(q_tile.to(tl.float32) * k[None, :], 1) * scale
    score = tl.where(has_newest, score, float("-inf"))
    new_max = tl.maximum(line_max, score)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight, alpha = tl.exp2(score - shift), tl.exp2(line_max - shift)
    acc = acc * alpha[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
    return acc, new_max, line_sum * alpha + weight


@triton.jit
def _load_turn(rope, position, dims, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cosine and the sine for every dimension of a head; each serves two of them."""
    half: tl.constexpr = HEAD_DIM // 2
    place = tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + tl.where(
        dims < half, dims, dims - half
    )
    cos = tl.load(rope + place, mask=dims < HEAD_DIM, other=0.0)
    sin = tl.load(rope + place + half, mask=dims < HEAD_DIM, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _load_turned(  # type: ignore[no-untyped-def]
    heads,
    dims,
    lines,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load GROUP queries and a key, normalise them if asked to, and turn them like `rope_write`."""
    half: tl.constexpr = HEAD_DIM // 2
    dtype = heads.dtype.element_ty
    others = tl.where(dims < half, dims + half, dims - half)
    mask = (lines <= GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    mine = tl.load(heads + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads + others, mask=mask, other=0.0).to(tl.float32)
    if q_norm is not None:
        factor = tl.rsqrt(tl.sum(mine * mine, 1) / HEAD_DIM + eps)[:, None]
        # Tiles, though their lines are alike: the threads then have what they need at once.
        norm = tl.where((lines < GROUP)[:, None], q_norm, k_norm)
        mine = (mine * factor).to(dtype) * tl.load(norm + dims, mask=mask, other=0.0)
        other = (other * factor).to(dtype) * tl.load(norm + others, mask=mask, other=0.0)
    signed = tl.where((dims < half)[None, :], -other, other).to(tl.float32)
    return (mine.to(tl.float32) * cos + signed * sin).to(dtype)


@triton.jit
def _token_of(query_index, row):  # type: ignore[no-untyped-def]
    return (row if query_index is None else tl.load(query_index + row)).to(tl.int64)
