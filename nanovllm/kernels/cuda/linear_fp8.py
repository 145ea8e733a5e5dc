"""Products of many rows with weights in FP8 on CUDA: activations are rounded to FP8 as well.

A row has one scale, or one for every 128 inputs where the weight has; `quantise_rows` and
`quantised_product` in stored_weights.py say in plain torch what these compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.stored_weights import (
    FP8,
    LARGEST_FP8,
    SMALLEST_LARGEST,
    Fp8Rows,
    Fp8Weight,
    num_blocks,
)

LARGEST = tl.constexpr(LARGEST_FP8)
SMALLEST = tl.constexpr(SMALLEST_LARGEST)
MULTIPLE = 16  # of inputs and outputs, which the library's product needs


def runs_in_fp8(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the product of many rows is one of FP8 numbers on both sides."""
    num_out, num_in = weight.shape
    return x.dtype == torch.bfloat16 and num_out % MULTIPLE == 0 and num_in % MULTIPLE == 0


def fp8_many_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Quantise the rows of x [rows, in], and project them to [rows, out]."""
    rows = fp8_quantise(x, weight.has_blocks)
    if weight.has_blocks:
        return fp8_block_product(rows, weight, bias, x.dtype)
    y: Tensor = torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return y


def fp8_quantise(x: Tensor, by_block: bool) -> Fp8Rows:
    """See quantise_rows."""
    num_rows, num_in = x.shape
    num_scales = num_blocks(num_in) if by_block else 1
    codes = torch.empty(num_rows, num_in, device=x.device, dtype=FP8)
    scales = torch.empty(num_rows, num_scales, device=x.device, dtype=torch.float32)
    block = max(128, triton.next_power_of_2(num_in))
    _quantise[(num_rows,)](
        codes,
        scales,
        x,
        NUM_IN=num_in,
        NUM_SCALES=num_scales,
        BY_BLOCK=by_block,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(x, num_rows),
    )
    return Fp8Rows(codes, scales)


def fp8_block_product(
    rows: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply block by block of 128 inputs; the scales of both sides are those of blocks."""
    num_rows, num_in = rows.codes.shape
    num_out = weight.shape[0]
    y = torch.empty(num_rows, num_out, device=rows.codes.device, dtype=dtype)
    block_rows = 64 if num_rows <= 64 else 128
    num_tiles = triton.cdiv(num_rows, block_rows) * triton.cdiv(num_out, 128)
    _block_product[(num_tiles,)](
        y,
        rows.codes,
        rows.scales,
        weight.codes,
        weight.scales,
        bias,
        num_rows,
        num_out,
        NUM_IN=num_in,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=128,
        num_warps=block_rows // 16,
        num_stages=4,
        **launch_options(rows.codes, num_rows),
    )
    return y


def fp8_widen(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in a dtype of 16 bits."""
    num_out, num_in = weight.shape
    y = torch.empty(num_out, num_in, device=weight.codes.device, dtype=dtype)
    num_scales, block = weight.scales.shape[1], 1024
    _widen[(triton.cdiv(num_in, block), num_out)](
        y, weight.codes, weight.scales, num_in, NUM_SCALES=num_scales, BLOCK=block, num_warps=4
    )
    return y


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    NUM_IN: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program has one row."""
    row = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = BLOCK // 128 if BY_BLOCK else 1
    part = tl.arange(0, PARTS)
    i = part[:, None] * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)[None, :]
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * NUM_IN + i, mask=i < NUM_IN, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), SMALLEST)
    limit = tl.zeros_like(largest) + LARGEST
    tl.store(scales + row * NUM_SCALES + part, largest * (1 / LARGEST), mask=part < NUM_SCALES)
    scaled = tl.clamp(values * tl.div_rn(limit, largest)[:, None], -LARGEST, LARGEST)
    tl.store(codes + row * NUM_IN + i, scaled.to(codes.dtype.element_ty), mask=i < NUM_IN)


@triton.jit(do_not_specialize=("num_rows",))
def _block_product(  # type: ignore[no-untyped-def]
    y,
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    num_rows,
    num_out,
    NUM_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has a tile of y; tiles that share rows of the weight follow each other."""
    NUM_BLOCKS: tl.constexpr = (NUM_IN + 127) // 128
    tile_rows, tile_out = _place(num_rows, num_out, BLOCK_ROWS, BLOCK_OUT)
    rows = tile_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = tile_out * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_out = rows < num_rows, outs < num_out
    lanes = tl.arange(0, 128)
    x_start = x + rows.to(tl.int64)[:, None] * NUM_IN
    w_start = weight + outs.to(tl.int64)[None, :] * NUM_IN
    x_scale_start = x_scales + rows.to(tl.int64) * NUM_BLOCKS
    w_scale_start = w_scales + outs.to(tl.int64) * NUM_BLOCKS
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for block in tl.range(0, NUM_BLOCKS):
        i = block * 128 + lanes
        x_mask, w_mask = is_row[:, None], is_out[None, :]
        if NUM_IN % 128 != 0:
            x_mask, w_mask = x_mask & (i < NUM_IN)[None, :], w_mask & (i < NUM_IN)[:, None]
        x_tile = tl.load(x_start + i[None, :], mask=x_mask, other=0.0)
        w_tile = tl.load(w_start + i[:, None], mask=w_mask, other=0.0)
        x_scale = tl.load(x_scale_start + block, mask=is_row, other=0.0)
        w_scale = tl.load(w_scale_start + block, mask=is_out, other=0.0)
        sums += tl.dot(x_tile, w_tile) * x_scale[:, None] * w_scale[None, :]
    if bias is not None:
        sums += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    y_tile = y + rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    tl.store(y_tile, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _place(num_rows, num_out, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which tile of y a program has: bands of eight tiles of rows, which L2 holds."""
    tile, num_outs = tl.program_id(0), tl.cdiv(num_out, BLOCK_OUT)
    band = tile // (8 * num_outs)
    high = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - band * 8, 8)
    within = tile % (8 * num_outs)
    return band * 8 + within % high, within // high


@triton.jit
def _widen(y, codes, scales, num_in, NUM_SCALES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The grid is (inputs, outputs)."""
    out = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < num_in
    block = i // 128 if NUM_SCALES > 1 else 0 * i
    scale = tl.load(scales + out * NUM_SCALES + block, mask=is_in, other=0.0)
    values = tl.load(codes + out * num_in + i, mask=is_in, other=0.0).to(tl.float32) * scale
    tl.store(y + out * num_in + i, values.to(y.dtype.element_ty), mask=is_in)
