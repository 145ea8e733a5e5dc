"""Projections of a few rows on CUDA, where reading the weight is what takes the time.

A program computes 64 outputs of up to 128 rows. Where that makes too few programs to fill the
device, the product is split along the inputs (split-K): each split gives partial sums in float32,
which the RMSNorm that follows adds up. A weight in FP8 is widened in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.linear_tiles import add_bias, shared_bytes, store_tile, tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, prefetch, wait_for_inputs
from nanovllm.kernels.ops import Activation

BLOCK_OUT = 64  # outputs of one program: what a tensor core instruction takes
NUM_PROGRAMS = 128  # that fill a device
MAX_SPLITS = 4
# A finished product is faster than cuBLAS up to these rows of x and bytes of the weight.
MAX_ROWS, MAX_BYTES = 64, 32 << 20
# Partial sums, which the norm adds up, are faster up to MAX_ROWS, and for a small weight to more.
MAX_SPLIT_ROWS, MAX_SPLIT_BYTES = 256, 6 << 20
NUM_PREFETCHED = tl.constexpr(256)  # inputs of each output, prefetched before x is there
CACHE_LINE = tl.constexpr(64)  # elements of 16 bits


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    block_rows: int  # of x in one program
    block_in: int  # inputs per step of the loop
    num_stages: int


def few_rows_config(num_rows: int, num_in: int, x: Tensor, weight: Tensor) -> FewRowsConfig:
    """Keep as many tiles of the weight in flight as shared memory holds."""
    # Of 65 to 128 rows two programs have 64 each, since one for all occupies half of the device.
    block_rows = 128 if num_rows > 128 else min(max(16, triton.next_power_of_2(num_rows)), 64)
    block_in = 128 // weight.itemsize  # a cache line
    stage_bytes = (BLOCK_OUT * weight.itemsize + block_rows * x.itemsize) * block_in
    # What is widened in registers takes longer than it is loaded.
    most = 8 if weight.itemsize > 1 else 6 if block_rows == 16 else 4
    num_stages = min(most, shared_bytes(x.device) // stage_bytes, num_in // block_in + 1)
    return FewRowsConfig(block_rows, block_in, num_stages)


def has_few_rows(num_rows: int, weight: Tensor) -> bool:
    """Whether this kernel beats cuBLAS, which starts more slowly but reads faster."""
    return num_rows <= MAX_ROWS and weight.nbytes <= MAX_BYTES


def choose_splits(num_rows: int, weight: Tensor) -> int:
    """Into how many parts to split the inputs to fill the device: a power of two; 1: do not."""
    is_small = num_rows <= MAX_SPLIT_ROWS and weight.nbytes <= MAX_SPLIT_BYTES
    if num_rows == 1 or not (is_small or num_rows <= MAX_ROWS):
        return 1
    num_out, num_in = weight.shape
    wanted = NUM_PROGRAMS * BLOCK_OUT // num_out
    most = max(1, min(wanted, MAX_SPLITS, num_in // 128))
    return 1 << (most.bit_length() - 1)


def few_rows_linear(
    x: Tensor,  # [rows, in], contiguous
    weight: Tensor,  # [out, in], contiguous; gated: gate, then up
    bias: Tensor | None,
    activation: Activation | None,
    num_splits: int = 1,
    config: FewRowsConfig | None = None,
    scales: Tensor | None = None,  # of an Fp8Weight, whose codes are then the weight
) -> Tensor:
    """Project x to [rows, out]; with splits, to partial sums: float32 [splits, rows, out]."""
    num_rows, num_in = x.shape
    config = config or few_rows_config(num_rows, num_in // num_splits, x, weight)
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    shape = (num_rows, num_out) if num_splits == 1 else (num_splits, num_rows, num_out)
    dtype = x.dtype if num_splits == 1 else torch.float32
    assert num_splits == 1 or activation is None
    y = torch.empty(shape, device=x.device, dtype=dtype)
    block_out = BLOCK_OUT if activation is None else BLOCK_OUT // 2
    grid = triton.cdiv(num_out, block_out), triton.cdiv(num_rows, config.block_rows), num_splits
    _few_rows[grid](
        y,
        x,
        weight,
        bias,
        num_rows,
        num_out,
        scales,
        NUM_IN=num_in,
        NUM_SCALES=0 if scales is None else scales.shape[1],
        SPLIT_IN=triton.cdiv(num_in, num_splits * config.block_in) * config.block_in,
        BLOCK_ROWS=config.block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=config.block_in,
        ACTIVATION=activation,
        IS_EVEN=num_out % block_out == 0 and num_in % (num_splits * config.block_in) == 0,
        num_warps=4,
        num_stages=config.num_stages,
        **launch_options(x, num_rows),
    )
    return y


@triton.jit
def _load(w_start, x_start, i, is_out, is_row, num_in, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the next inputs of the weight and of x."""
    if IS_EVEN:
        w_tile = tl.load(w_start + i[None, :])
        x_tile = tl.load(x_start + i[:, None], mask=is_row, other=0.0)
    else:
        w_tile = tl.load(
            w_start + i[None, :], mask=is_out[:, None] & (i < num_in)[None, :], other=0.0
        )
        x_tile = tl.load(x_start + i[:, None], mask=is_row & (i < num_in)[:, None], other=0.0)
    return w_tile, x_tile


@triton.jit
def _add_codes(sums, w_tile, x_tile, scales, w_rows, is_out, block, NUM_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the product of codes; where blocks of inputs have scales, a tile is one."""
    wide = _widen(w_tile, x_tile.dtype)
    if NUM_SCALES == 1:
        return tl.dot(wide, x_tile, sums, input_precision="ieee")
    else:
        pointers = scales + w_rows.to(tl.int64)[:, None] * NUM_SCALES + block
        scale = tl.load(pointers, mask=is_out[:, None] & (block < NUM_SCALES), other=0.0)
        return sums + tl.dot(wide, x_tile, input_precision="ieee") * scale


@triton.jit
def _widen(tile, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Widen FP8; to bfloat16 by moving bits, which is faster than the two conversions it takes."""
    if dtype == tl.bfloat16:
        return _widen_to_bfloat16(tile)
    else:
        return tile.to(dtype)


@triton.jit
def _widen_to_bfloat16(tile):  # type: ignore[no-untyped-def]
    # Sign, exponent and fraction have their places; then the exponents' biases differ by 120.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 c, a, 0x7F007F00;
        and.b32 d, b, 0x7F007F00;
        shr.b32 c, c, 4;
        shr.b32 d, d, 4;
        lop3.b32 a, a, 0x80008000, c, 0xEA;
        lop3.b32 b, b, 0x80008000, d, 0xEA;
        mov.b32 c, 0x7B807B80;
        mov.b32 d, 0x80008000;
        fma.rn.bf16x2 $0, a, c, d;
        fma.rn.bf16x2 $1, b, c, d;
        }
        """,
        "=r,=r,r",
        [tile],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=("num_rows",))  # one kernel serves all batches up to BLOCK_ROWS
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    bias,
    num_rows,
    num_out,
    scales,
    NUM_IN: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SPLIT_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The grid is (outputs, rows, splits), of which the first adds the bias."""
    first_in = tl.program_id(2) * SPLIT_IN
    w_rows, is_out = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, ACTIVATION is not None)
    w_start = weight + first_in + w_rows.to(tl.int64)[:, None] * NUM_IN
    if OVERLAP and IS_EVEN:  # the kernels before this one do not write the weight
        for begin in tl.range(0, min(SPLIT_IN, NUM_PREFETCHED), CACHE_LINE):
            prefetch(w_start + begin)
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = (rows < num_rows)[None, :]
    x_start = x + first_in + rows[None, :] * NUM_IN
    sums = tl.zeros((w_rows.shape[0], BLOCK_ROWS), tl.float32)
    for begin in tl.range(0, SPLIT_IN, BLOCK_IN):
        i = begin + tl.arange(0, BLOCK_IN)
        w_tile, x_tile = _load(w_start, x_start, i, is_out, is_row, NUM_IN - first_in, IS_EVEN)
        if NUM_SCALES == 0:
            sums = tl.dot(w_tile, x_tile, sums, input_precision="ieee")
        else:
            block = (first_in + begin) // BLOCK_IN
            sums = _add_codes(sums, w_tile, x_tile, scales, w_rows, is_out, block, NUM_SCALES)
    if NUM_SCALES == 1:
        sums *= tl.load(scales + w_rows[:, None], mask=is_out[:, None], other=0.0)
    sums = add_bias(sums, bias, w_rows, is_out, first_in == 0)
    targets = tl.program_id(2) * num_rows + rows
    store_tile(y, sums, targets, rows < num_rows, num_out, BLOCK_OUT, ACTIVATION)
