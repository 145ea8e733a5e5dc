"""Products of some rows in FP8 with few outputs on CUDA, as partial sums over the inputs.

The library gives each tile of outputs to one program, which then reads all of its inputs: with few
outputs most of the device is idle. Here some programs share them, and the norm that follows adds
their sums up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.fp8 import ScaledCodes
from nanovllm.kernels.cuda.linear_tiles import add_bias, store_tile, tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.stored_weights import Fp8Weight

MAX_ROWS = 256
MAX_OUTPUTS = 8192
BLOCK_IN = 128


@dataclass(frozen=True, slots=True)
class SplitConfig:
    block_out: int
    block_rows: int
    num_warps: int
    num_stages: int
    num_splits: int


def split_config(weight: Fp8Weight, num_rows: int) -> SplitConfig:
    """By Qwen3-8B's shapes on an H200."""
    block_rows = 64 if num_rows <= 64 else 128
    return SplitConfig(128, block_rows, 8, 4, 4 if weight.shape[0] <= 4096 else 2)


def suits_split(weight: Fp8Weight, num_rows: int) -> bool:
    return not weight.has_blocks and num_rows <= MAX_ROWS and weight.shape[0] <= MAX_OUTPUTS


def fp8_partial_sums(
    rows: ScaledCodes, weight: Fp8Weight, bias: Tensor | None, config: SplitConfig | None = None
) -> Tensor:
    """Project rows of codes to partial sums: float32 [splits, rows, out]."""
    num_rows, num_codes = rows.codes.shape
    num_out = weight.shape[0]
    config = config or split_config(weight, num_rows)
    size = config.num_splits, num_rows, num_out
    y = torch.empty(size, device=rows.codes.device, dtype=torch.float32)
    _partial_sums[
        triton.cdiv(num_rows, config.block_rows),
        triton.cdiv(num_out, config.block_out),
        config.num_splits,
    ](
        *(y, rows.codes, rows.scales, weight.codes, weight.scales, bias, num_rows, num_out),
        triton.cdiv(num_codes, config.num_splits * BLOCK_IN) * BLOCK_IN,
        NUM_CODES=num_codes,
        BLOCK_ROWS=config.block_rows,
        BLOCK_OUT=config.block_out,
        BLOCK=BLOCK_IN,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(rows.codes, num_rows),
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))
def _partial_sums(  # type: ignore[no-untyped-def]
    y,
    x,
    x_scales,
    codes,
    scales,
    bias,
    num_rows,
    num_out,
    split_size,
    NUM_CODES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The grid is (rows, outputs, splits): programs of the same outputs run at the same time."""
    first, tile = tl.program_id(2) * split_size, tl.program_id(1)
    w_rows, is_out = tile_rows(tile, num_out, BLOCK_OUT, False)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row, lanes = rows < num_rows, tl.arange(0, BLOCK)
    # What lies beyond is read again from the last row, and not stored.
    w_start = codes + tl.minimum(w_rows, num_out - 1).to(tl.int64)[:, None] * NUM_CODES
    x_start = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[None, :] * NUM_CODES
    scale = tl.load(scales + w_rows, mask=is_out, other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for i in tl.range(first, tl.minimum(first + split_size, NUM_CODES), BLOCK):
        w = tl.load(w_start + (i + lanes)[None, :])
        sums = tl.dot(w, tl.load(x_start + (i + lanes)[:, None]), sums)
    x_scale = tl.load(x_scales + rows, mask=is_row, other=0.0)
    sums = add_bias(sums * scale[:, None] * x_scale[None, :], bias, w_rows, is_out, first == 0)
    targets = tl.program_id(2) * num_rows + rows
    store_tile(y, sums, tile, targets, is_row, num_out, BLOCK_OUT, None)
