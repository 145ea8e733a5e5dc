"""Attention over a paged KV cache for rows of one query token."""

from __future__ import annotations

from dataclasses import dataclass

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
    load_parts,
    power_of_two_below,
)
from nanovllm.kernels.cuda.attention_tiles import (
    COLUMNS,
    LOG2_E,
    MIN_Q_ROWS,
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

MIN_SPLIT = 64  # keys that are worth a program of their own
PROGRAMS_PER_SM = 5  # decode programs that a multiprocessor should get
LARGE_TILE_PAIRS = range(192, 385)  # of row and kv head, whose contexts are read in large tiles
SHORT_CONTEXT = 512  # keys, up to which a second split gains less than joining both costs


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of one token; all columns are [rows] on the device."""

    slots: Tensor
    context_lens: Tensor  # the keys each row attends to; 0 is padding
    query_index: Tensor | None = None  # each row's token in the batch; None: row i is token i
    order: Tensor | None = None  # to start them in, the longest first is best; None: as they come


@dataclass(frozen=True, slots=True)
class SharedPart:
    """What `attend_shared` found, which rows of one token are to begin with."""

    lens: Tensor  # [rows], the keys that are in it, fewer than there are
    parts: Parts


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    tile: int  # keys per step of the loop
    num_warps: int
    num_stages: int
    min_split: int = MIN_SPLIT


def decode_config(
    head_dim: int, dtype: torch.dtype, has_large_tiles: bool = False, has_codes: bool = False
) -> DecodeConfig:
    """Choose what measured fastest; `has_large_tiles` is what `suits_large_tiles` said."""
    if has_codes and dtype != torch.float32 and head_dim <= 128:
        return DecodeConfig(tile=64, num_warps=4, num_stages=3)
    if dtype == torch.float32:  # without tensor cores, small tiles save registers
        return DecodeConfig(tile=16, num_warps=4, num_stages=3)
    if has_large_tiles and head_dim <= 128:
        return DecodeConfig(tile=64, num_warps=4, num_stages=3)
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


def suits_large_tiles(num_rows: int, num_kv_heads: int, num_splits: int) -> bool:
    """On Hopper: where two splits of each context nearly fill the device, two in a processor."""
    return num_splits == 2 and num_rows * num_kv_heads in LARGE_TILE_PAIRS


def paged_decode(
    q: Tensor,  # [tokens, heads, head_dim]; stride(0) is free
    cache: PagedCache,
    rows: SingleRows,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    scale: float,
    window: int | None,
    num_splits: int,  # a power of two
    shared: SharedPart | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attend from the last token of each row's context (none: zeros), also inside a CUDA graph."""
    assert shared is None or (window is None and rows.query_index is None)
    num_rows, num_heads, head_dim = len(rows.slots), *q.shape[1:]
    config = config or decode_config(head_dim, q.dtype, has_codes=cache.has_codes)
    assert config.min_split % config.tile == 0
    shape = kernel_shape(q, cache, out, window)
    if num_rows == 0:
        return
    parts = allocate_parts(q, num_rows, num_splits) if num_splits > 1 else None
    split = {"TILE": config.tile, "SPLITS": num_splits, "MIN_SPLIT": config.min_split}
    num_kv_heads, options = cache.k.shape[2], launch_options(q, len(q))
    shared_lens = None if shared is None else shared.lens
    _decode_kernel[num_kv_heads, num_rows, num_splits](
        (q, cache.parts, cache.block_table, out),
        *(rows.slots, rows.context_lens, shared_lens, rows.query_index, rows.order),
        *(parts, None if shared is None else shared.parts),
        *(strides(q, cache), scale * LOG2_E),
        **(shape | split),
        Q_ROWS=max(MIN_Q_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    if parts is not None:
        _combine_kernel[num_rows, num_heads](
            *(parts, rows.context_lens, shared_lens, rows.query_index, out),
            **split,
            WINDOW=window,
            HEAD_DIM=head_dim,
            **options,
        )


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _decode_kernel(  # type: ignore[no-untyped-def]
    tensors,
    slots,
    context_lens,
    shared_lens,
    query_index,
    order,
    parts,
    shared,
    strides,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One query over one split of its row's keys, for the heads of one kv head."""
    row, kv_head = tl.program_id(1), tl.program_id(0)
    q, caches, block_table, out = tensors
    q_stride, table_stride, block_stride = strides
    if order is not None:
        row = tl.load(order + row)
    length = tl.load(context_lens + row)
    first = _first_key(length, shared_lens, row, WINDOW)
    lo, hi = find_split(first, length, SPLITS, TILE, MIN_SPLIT)
    token = _token_of(query_index, row)
    blocks = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    block_ids = find_blocks(blocks, lo, length, BLOCK_SIZE, TILE)
    wait_for_inputs(OVERLAP)
    if SPLITS > 1:  # noqa: SIM102 - one is known when compiling, the other is not
        if lo >= hi:
            return
    members, dims = tl.arange(0, Q_ROWS), head_dims(HEAD_DIM)
    is_head = members < GROUP
    heads = kv_head * GROUP + members
    is_real = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + token * q_stride + (heads * HEAD_DIM)[:, None] + dims, mask=is_real, other=0.0
    )
    if shared is None:
        softmax = begin_softmax(Q_ROWS, HEAD_DIM)
    else:
        is_begun = is_head & (first > 0) & (tl.program_id(2) == 0)
        softmax = load_parts(shared, row * KV_HEADS * GROUP + heads, dims, is_begun, HEAD_DIM)
    seen = first + 0 * members, hi - 1 + 0 * members
    softmax = attend_head(
        *(softmax, q_tile, caches, kv_head, blocks, block_ids, length, (lo, hi, first)),
        *((first, hi), seen, block_stride, scale),
        *(WINDOW, HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, False),
    )
    out_rows = (token if parts is None else row) * (KV_HEADS * GROUP) + heads
    store_softmax(out, parts, out_rows, dims, softmax, is_head, HEAD_DIM, SPLITS)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _combine_kernel(  # type: ignore[no-untyped-def]
    parts,
    context_lens,
    shared_lens,
    query_index,
    out,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the splits of one query head."""
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(context_lens + row)
    wait_for_inputs(OVERLAP)
    first, dims = _first_key(length, shared_lens, row, WINDOW), head_dims(HEAD_DIM)
    values = join_splits(
        *(parts, row * num_heads + head, dims, first, length, HEAD_DIM, SPLITS, TILE, MIN_SPLIT)
    )
    offsets = (_token_of(query_index, row) * num_heads + head) * HEAD_DIM + dims
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _first_key(length, shared_lens, row, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that is left to attend to."""
    return window_start(length - 1, WINDOW) if shared_lens is None else tl.load(shared_lens + row)


@triton.jit
def _token_of(query_index, row):  # type: ignore[no-untyped-def]
    return (row if query_index is None else tl.load(query_index + row)).to(tl.int64)
