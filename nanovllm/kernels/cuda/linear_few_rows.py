"""Projections of a few rows on CUDA, where reading the weight is what takes the time.

A program computes 64 outputs of up to 128 rows. Where that makes too few programs to fill the
device, the product is split along the inputs (split-K): each split gives partial sums in float32,
which the RMSNorm that follows adds up.
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
    num_stages = min(8, shared_bytes(x.device) // stage_bytes, num_in // block_in + 1)
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
        NUM_IN=num_in,
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


@triton.jit(do_not_specialize=("num_rows",))  # one kernel serves all batches up to BLOCK_ROWS
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    bias,
    num_rows,
    num_out,
    NUM_IN: tl.constexpr,
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
        sums = tl.dot(w_tile, x_tile, sums, input_precision="ieee")
    sums = add_bias(sums, bias, w_rows, is_out, first_in == 0)
    targets = tl.program_id(2) * num_rows + rows
    tile, is_row = tl.program_id(0), rows < num_rows
    store_tile(y, sums, tile, targets, is_row, num_out, BLOCK_OUT, ACTIVATION)
