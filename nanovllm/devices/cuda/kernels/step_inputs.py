"""Gather the inputs of a step from the InputBatch tables: tokens, positions and slot_mapping."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs


def gather_decode(
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    rope_offsets: Tensor,
    block_size: int,
    columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Gather the inputs of a decode step; a slot of length 0 is padding.

    A row runs the last token of its slot. If n rows have the same slot, they run its last n tokens.
    `columns` are the output tensors: tokens, positions plus `rope_offsets`, slot_mapping
    [groups, rows] and context lengths of the rows, and the row indices sorted by sequence length,
    longest first.
    """
    num_rows = len(slots)
    block = min(triton.next_power_of_2(num_rows), 128)
    _gather[(triton.cdiv(num_rows, block),)](
        *(slots, None, lengths, tokens, block_tables, rope_offsets, columns),
        *(num_rows, None, tokens.stride(0), *block_tables.stride()[:2], columns[2].stride(0)),
        NUM_GROUPS=block_tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=block,
        **launch_options(slots, num_rows),
    )


def gather_tokens(
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    rope_offsets: Tensor,
    block_size: int,
    columns: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Look up the tokens at the given positions of slots, and their slot_mapping.

    `slots` and `positions` are int32. The last slot of the tables is padding, for which the token
    is 0 and slot_mapping is -1. `columns` are the output tensors: tokens, positions (int64) plus
    `rope_offsets`, and slot_mapping [groups, tokens].
    """
    num_tokens, block = len(slots), 256
    _gather[(triton.cdiv(num_tokens, block),)](
        *(slots, positions, None, tokens, block_tables, rope_offsets, columns),
        *(num_tokens, len(tokens) - 1, tokens.stride(0), *block_tables.stride()[:2]),
        columns[2].stride(0),
        NUM_GROUPS=block_tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=block,
        OVERLAP=False,
    )


def write_words(words: Tensor, pairs: Tensor, count: Tensor) -> None:
    """Set words[offset] = value for the first `count` [1] of the (offset, value) `pairs` [n, 2].

    All tensors are int32.
    """
    block = 1024
    _write_words[(triton.cdiv(len(pairs), block),)](words, pairs, count, len(pairs), BLOCK=block)


@triton.jit(do_not_specialize_on_alignment=("slots", "positions"))
def _gather(  # type: ignore[no-untyped-def]
    slots,
    positions,
    lengths,
    tokens,
    block_tables,
    rope_offsets,
    columns,
    num_rows,
    padding,
    tokens_stride,
    slot_stride,
    group_stride,
    mapping_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Gather tokens at given positions or, without `positions`, the last tokens of each slot."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
    if positions is None:
        slot_length = tl.load(lengths + slot, mask=mask, other=0)
        rank, num_after = _order(slots, lengths, row, slot, slot_length, num_rows, BLOCK)
        length = tl.maximum(slot_length - num_after, 0)
        position, is_used = tl.maximum(length - 1, 0), mask & (length > 0)
    else:
        position = tl.load(positions + row, mask=mask, other=0)
        is_used = mask & (slot != padding)
    token = tl.load(tokens + slot * tokens_stride + position, mask=is_used, other=0)
    entry = block_tables + slot * slot_stride + position // BLOCK_SIZE
    for group in tl.static_range(NUM_GROUPS):
        block = tl.load(entry + group * group_stride, mask=is_used, other=0).to(tl.int64)
        cache_slot = tl.where(is_used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(columns[2] + group * mapping_stride + row, cache_slot, mask=mask)
    tl.store(columns[0] + row, token, mask=mask)
    offset = tl.load(rope_offsets + slot, mask=is_used, other=0)
    tl.store(columns[1] + row, (position + offset).to(tl.int64), mask=mask)
    if positions is None:
        tl.store(columns[3] + row, length, mask=mask)
        tl.store(columns[4] + rank, row, mask=mask)


@triton.jit
def _order(slots, lengths, row, slot, length, num_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each row's index in the order from the longest sequence to the shortest.

    Also return the number of later rows that have the same slot.
    """
    CHUNK: tl.constexpr = BLOCK if BLOCK < 32 else 32
    rank = tl.zeros((BLOCK,), tl.int32)
    num_after = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_rows, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_slot = tl.load(slots + other, mask=other < num_rows, other=-1)
        other_length = tl.load(lengths + other_slot, mask=other < num_rows, other=-1)
        is_later = (other_slot[None, :] == slot[:, None]) & (other[None, :] > row[:, None])
        num_after += tl.sum(is_later.to(tl.int32), 1)
        is_longer = other_length[None, :] > length[:, None]
        is_earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        rank += tl.sum((is_longer | is_earlier).to(tl.int32), 1)
    return rank, num_after


# `pairs` and `count` are slices of a larger upload, so their alignment varies.
@triton.jit(do_not_specialize_on_alignment=("pairs", "count"))
def _write_words(words, pairs, count, num_pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = i < tl.minimum(tl.load(count), num_pairs)
    offset = tl.load(pairs + 2 * i, mask=is_pair, other=0)
    tl.store(words + offset, tl.load(pairs + 2 * i + 1, mask=is_pair, other=0), mask=is_pair)
