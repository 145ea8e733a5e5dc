"""Projections of some rows by weights in 4 bits (Int4Weight), which are widened in registers.

The word w of a block of 128 inputs has in its bits 4 * n the code of input 16 * n + w. So one shift
of a tile of words gives codes whose inputs lie side by side, whatever n is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.linear_tiles import add_bias, store_tile, tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.ops import Activation
from nanovllm.kernels.stored_weights import Int4Weight

BLOCK_OUT = 64  # outputs of one program, of few rows


def int4_few_rows(
    x: Tensor,  # [rows, in], contiguous
    weight: Int4Weight,  # gated: gate, then up
    bias: Tensor | None,
    activation: Activation | None,
    num_splits: int = 1,
    num_stages: int = 3,
) -> Tensor:
    """Project x to [rows, out]; with splits, to partial sums: float32 [splits, rows, out]."""
    num_rows, num_words = len(x), weight.words.shape[1]
    num_out = len(weight.words) if activation is None else len(weight.words) // 2
    shape = (num_rows, num_out) if num_splits == 1 else (num_splits, num_rows, num_out)
    dtype = x.dtype if num_splits == 1 else torch.float32
    assert num_splits == 1 or activation is None
    y = torch.empty(shape, device=x.device, dtype=dtype)
    block_out = BLOCK_OUT if activation is None else BLOCK_OUT // 2
    block_rows = min(max(16, triton.next_power_of_2(num_rows)), 128)
    grid = triton.cdiv(num_out, block_out), triton.cdiv(num_rows, block_rows), num_splits
    _few_rows[grid](
        y,
        x,
        weight.words,
        weight.scales,
        weight.zeros,
        bias,
        num_rows,
        num_out,
        NUM_IN=weight.num_in,
        NUM_WORDS=num_words,
        SPLIT_WORDS=triton.cdiv(num_words, num_splits * 16) * 16,
        GROUP=weight.group,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out,
        ACTIVATION=activation,
        num_warps=4,
        num_stages=num_stages,
        **launch_options(x, num_rows),
    )
    return y


def int4_widen(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in a dtype of 16 bits."""
    num_rows, num_words = weight.words.shape
    y = torch.empty(weight.shape, device=weight.words.device, dtype=dtype)
    block_out = 32
    _widen[(num_words // 16, triton.cdiv(num_rows, block_out))](
        y,
        weight.words,
        weight.scales,
        weight.zeros,
        num_rows,
        NUM_IN=weight.num_in,
        NUM_WORDS=num_words,
        GROUP=weight.group,
        BLOCK_OUT=block_out,
        num_warps=4,
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))  # one kernel serves all batches up to BLOCK_ROWS
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    words,
    scales,
    zeros,
    bias,
    num_rows,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    SPLIT_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The grid is (outputs, rows, splits), of which the first adds the bias."""
    first_word = tl.program_id(2) * SPLIT_WORDS
    w_rows, is_out = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, ACTIVATION is not None)
    w_start = words + w_rows.to(tl.int64)[:, None] * NUM_WORDS
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = (rows < num_rows)[None, :]
    lanes = tl.arange(0, 16)
    sums = tl.zeros((w_rows.shape[0], BLOCK_ROWS), tl.float32)
    for word in tl.range(first_word, min(first_word + SPLIT_WORDS, NUM_WORDS), 16):
        tile = tl.load(w_start + (word + lanes)[None, :], mask=is_out[:, None], other=0)
        for part in tl.static_range(128 // GROUP):
            group = word // 16 * (128 // GROUP) + part
            scale, zero = _load_scales(scales, zeros, w_rows, is_out, group, NUM_WORDS * 8 // GROUP)
            products = tl.zeros((w_rows.shape[0], BLOCK_ROWS), tl.float32)
            inputs = tl.zeros((BLOCK_ROWS,), tl.float32)
            for n in tl.static_range(part * (GROUP // 16), (part + 1) * (GROUP // 16)):
                i = word * 8 + 16 * n + lanes
                is_in = is_row & (i < NUM_IN)[:, None]
                x_tile = tl.load(x + rows[None, :] * NUM_IN + i[:, None], mask=is_in, other=0.0)
                products = tl.dot(_signed(tile, n, x.dtype.element_ty), x_tile, products)
                if zeros is not None:
                    inputs += tl.sum(x_tile.to(tl.float32), 0)
            if zeros is not None:
                products -= (zero - 8.0)[:, None] * inputs[None, :]
            sums += products * scale[:, None]
    sums = add_bias(sums, bias, w_rows, is_out, first_word == 0)
    targets = tl.program_id(2) * num_rows + rows
    store_tile(y, sums, targets, rows < num_rows, num_out, BLOCK_OUT, ACTIVATION)


@triton.jit
def _load_scales(scales, zeros, rows, is_row, group, NUM_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = rows.to(tl.int64) * NUM_GROUPS + group
    scale = tl.load(scales + place, mask=is_row, other=0.0).to(tl.float32)
    zero = tl.full((rows.shape[0],), 8.0, tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + place, mask=is_row, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _signed(tile, n: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes less 8: added to the bits of 128 or 1024, they are numbers so much larger."""
    BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    LESS: tl.constexpr = 128 + 8 if dtype == tl.bfloat16 else 1024 + 8
    codes = (((tile >> (4 * n)) & 15) | BITS).to(tl.int16).to(dtype, bitcast=True)
    return codes - LESS


@triton.jit
def _widen(  # type: ignore[no-untyped-def]
    y,
    words,
    scales,
    zeros,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """The grid is (blocks of inputs, outputs)."""
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_out
    lanes = tl.arange(0, 16)
    place = out.to(tl.int64)[:, None] * NUM_WORDS + (tl.program_id(0) * 16 + lanes)[None, :]
    tile = tl.load(words + place, mask=is_out[:, None], other=0)
    for part in tl.static_range(128 // GROUP):
        group = tl.program_id(0) * (128 // GROUP) + part
        scale, zero = _load_scales(scales, zeros, out, is_out, group, NUM_WORDS * 8 // GROUP)
        for n in tl.static_range(part * (GROUP // 16), (part + 1) * (GROUP // 16)):
            i = tl.program_id(0) * 128 + 16 * n + lanes
            codes = ((tile >> (4 * n)) & 15).to(tl.float32) - zero[:, None]
            pointers = y + out.to(tl.int64)[:, None] * NUM_IN + i[None, :]
            mask = is_out[:, None] & (i < NUM_IN)[None, :]
            tl.store(pointers, (codes * scale[:, None]).to(y.dtype.element_ty), mask=mask)
