"""What a step runs, read from the tables of slots: tokens, positions and places in the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs


def gather_decode(
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    block_size: int,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Read from the tables what a decode step of these slots runs; a length of 0 is padding.

    The columns are the rows' tokens, positions, cache offsets and context lengths, and the rows
    themselves from the longest to the shortest.
    """
    num_rows = len(slots)
    block = min(triton.next_power_of_2(num_rows), 128)
    _gather_decode[(triton.cdiv(num_rows, block),)](
        slots,
        lengths,
        tokens,
        block_table,
        columns,
        num_rows,
        tokens.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        CHUNK=min(block, 32),
        num_warps=4,
        **launch_options(slots, num_rows),
    )


def write_words(words: Tensor, pairs: Tensor, count: Tensor) -> None:
    """Set words[offset] = value for the first pairs [pairs, 2] of both, as many as count [1] says.

    All are int32.
    """
    block = 1024
    _write_words[(triton.cdiv(len(pairs), block),)](words, pairs, count, len(pairs), BLOCK=block)


def gather_tokens(
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    block_size: int,
    columns: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Look up the tokens at some positions, and where in the cache their keys go.

    Slots and positions are int32; the last slot of the tables stands for padding, whose keys go
    nowhere: -1. The columns are the tokens, the positions in int64, and the cache offsets.
    """
    num_tokens, block = len(slots), 256
    _gather_tokens[(triton.cdiv(num_tokens, block),)](
        *(slots, positions, tokens, block_table, columns),
        *(num_tokens, len(tokens) - 1, tokens.stride(0), block_table.stride(0)),
        BLOCK_SIZE=block_size,
        BLOCK=block,
    )


@triton.jit
def _gather_decode(  # type: ignore[no-untyped-def]
    slots,
    lengths,
    tokens,
    block_table,
    columns,
    num_rows,
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    length = tl.load(lengths + slot, mask=mask, other=0)
    is_used = mask & (length > 0)
    position = tl.maximum(length - 1, 0)
    token = tl.load(tokens + slot * tokens_stride + position, mask=is_used, other=0)
    block = tl.load(
        block_table + slot * table_stride + position // BLOCK_SIZE, mask=is_used, other=0
    ).to(tl.int64)
    cache_offset = tl.where(is_used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    input_ids, positions, cache_offsets, context_lens, order = columns
    tl.store(input_ids + row, token, mask=mask)
    tl.store(positions + row, position.to(tl.int64), mask=mask)
    tl.store(cache_offsets + row, cache_offset, mask=mask)
    tl.store(context_lens + row, length, mask=mask)
    rank = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_rows, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_slot = tl.load(slots + other, mask=other < num_rows, other=0)
        other_length = tl.load(lengths + other_slot, mask=other < num_rows, other=-1)
        is_longer = other_length[None, :] > length[:, None]
        is_earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        rank += tl.sum((is_longer | is_earlier).to(tl.int32), 1)
    tl.store(order + rank, row, mask=mask)


@triton.jit(do_not_specialize_on_alignment=("pairs", "count"))  # they lie anywhere in an upload
def _write_words(words, pairs, count, num_pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = i < tl.minimum(tl.load(count), num_pairs)
    offset = tl.load(pairs + 2 * i, mask=is_pair, other=0)
    tl.store(words + offset, tl.load(pairs + 2 * i + 1, mask=is_pair, other=0), mask=is_pair)


@triton.jit(do_not_specialize_on_alignment=("slots", "positions"))
def _gather_tokens(  # type: ignore[no-untyped-def]
    slots,
    positions,
    tokens,
    block_table,
    columns,
    num_tokens,
    padding,
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_tokens
    slot = tl.load(slots + i, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(tokens + slot * tokens_stride + position, mask=mask, other=0)
    blocks = block_table + slot * table_stride
    block = tl.load(blocks + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    cache_offset = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(columns[0] + i, token, mask=mask)
    tl.store(columns[1] + i, position, mask=mask)
    tl.store(columns[2] + i, tl.where(slot == padding, -1, cache_offset), mask=mask)
