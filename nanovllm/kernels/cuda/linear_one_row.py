"""Projections of one row on CUDA: they read the weight once, at the speed of memory.

The RMSNorm before a projection and the gate after it ride along: the norm's scale is a factor of
the whole row, so a program multiplies by its weight on the way and divides at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.ops import Activation, NormWeights


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    norm: NormWeights | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what ComposedLinear would for x [1, in], and x + residual."""
    num_rows, num_in = x.shape
    assert num_rows == 1
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    y = torch.empty(1, num_out, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    block_out, block_in, num_warps = skinny_config(num_out, num_in, activation is not None)
    _skinny[(triton.cdiv(num_out, block_out),)](
        y,
        total,
        x,
        x if residual is None else residual,
        weight,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        num_out,
        NUM_IN=num_in,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        num_warps=num_warps,
        **launch_options(x, 1),
    )
    return y, total


def skinny_config(num_out: int, num_in: int, is_gated: bool) -> tuple[int, int, int]:
    """Outputs per program, inputs per tile, warps."""
    if num_in >= 4096:
        return 2, 4096, 4 if is_gated else 8
    if num_out <= 2048:
        return 2, min(triton.next_power_of_2(num_in), 2048), 4
    if num_in == 2048 and not is_gated:
        return 4, 2048, 4
    block_in = min(triton.next_power_of_2(num_in), 1024)
    return (8 if num_out <= 4096 and not is_gated else 4), block_in, 4


@triton.jit
def _skinny(  # type: ignore[no-untyped-def]
    y,
    total_out,
    x,
    residual,
    weight,
    bias,
    norm_weight,
    eps,
    num_out,
    NUM_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Products in float32; each tile of the weight is asked for while the one before is used."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_out
    lines = weight + out.to(tl.int64)[:, None] * NUM_IN
    up_lines = lines + num_out * NUM_IN
    lanes = tl.arange(0, BLOCK_IN)
    tile, up_tile = _load_tiles(lines, up_lines, lanes, is_out, NUM_IN, ACTIVATION is not None)
    wait_for_inputs(OVERLAP)  # the weight does not depend on the kernels before this one
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT,), tl.float32)
    squares = tl.zeros((1,), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + lanes
        is_in = i < NUM_IN
        next_tile, next_up = _load_tiles(
            lines, up_lines, i + BLOCK_IN, is_out, NUM_IN, ACTIVATION is not None
        )
        values = add_residual(total_out, x, residual, i, is_in, HAS_RESIDUAL)
        if HAS_NORM:
            squares += tl.sum(values * values, 0)
            values *= tl.load(norm_weight + i, mask=is_in, other=0.0).to(tl.float32)
        sums += tl.sum(tile.to(tl.float32) * values[None, :], 1)
        if ACTIVATION is not None:
            up_sums += tl.sum(up_tile.to(tl.float32) * values[None, :], 1)
        tile = next_tile
        up_tile = next_up
    if HAS_NORM:
        scale = tl.rsqrt(squares / NUM_IN + eps)
        sums *= scale
        up_sums *= scale
    if HAS_BIAS:
        sums += tl.load(bias + out, mask=is_out, other=0.0)
    if HAS_BIAS and ACTIVATION is not None:
        up_sums += tl.load(bias + num_out + out, mask=is_out, other=0.0)
    if ACTIVATION is not None:
        sums = activate(sums, ACTIVATION) * up_sums
    tl.store(y + out, sums.to(y.dtype.element_ty), mask=is_out)


@triton.jit
def _load_tiles(lines, up_lines, i, is_out, NUM_IN: tl.constexpr, IS_GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load some inputs' weights, and those of the up lines, if there are any."""
    mask = is_out[:, None] & (i < NUM_IN)[None, :]
    tile = tl.load(lines + i[None, :], mask=mask, other=0.0)
    up_tile = tile
    if IS_GATED:
        up_tile = tl.load(up_lines + i[None, :], mask=mask, other=0.0)
    return tile, up_tile


@triton.jit
def add_residual(total_out, x, residual, i, is_in, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return some inputs in float32; the first program stores them where there is a residual."""
    values = tl.load(x + i, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + i, mask=is_in, other=0.0)
        rounded = values.to(total_out.dtype.element_ty)
        is_first = is_in & (tl.program_id(0) + 0 * i == 0)
        tl.store(total_out + i, rounded, mask=is_first)
        values = rounded.to(tl.float32)
    return values
