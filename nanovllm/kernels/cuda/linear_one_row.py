"""Projections of one row on CUDA: reading the weight, once, is what takes the time.

The RMSNorm before the projection and the gate after it are fused with it. A program has the row's
sum of squares only when it has read the whole row, so it scales its outputs instead of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.ops import Activation, Hidden, NormWeights


def one_row_linear(
    hidden: Hidden,
    norm: NormWeights | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> tuple[Tensor, Tensor]:
    """Project residual + update [1, in], normed if asked for; return also that sum."""
    residual, update = hidden.residual, hidden.update
    num_in = weight.shape[1]
    assert residual.shape == (1, num_in), residual.shape
    assert update is None or update.shape == residual.shape, "partial sums of one row"
    assert hidden.scales is None, "sums of codes of one row"
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    y = torch.empty(1, num_out, device=residual.device, dtype=residual.dtype)
    total = residual if update is None else torch.empty_like(residual)
    block_out, block_in, num_warps = one_row_config(num_out, num_in, activation is not None)
    _one_row[(triton.cdiv(num_out, block_out),)](
        y,
        total,
        residual,
        update,
        weight,
        bias,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        num_out,
        NUM_IN=num_in,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        ACTIVATION=activation,
        num_warps=num_warps,
        **launch_options(residual, 1),
    )
    return y, total


def one_row_config(num_out: int, num_in: int, is_gated: bool) -> tuple[int, int, int]:
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
def _one_row(  # type: ignore[no-untyped-def]
    y,
    total_out,
    residual,
    update,
    weight,
    bias,
    norm_weight,
    eps,
    num_out,
    NUM_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply in float32; each tile of the weight is loaded while the one before is used."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_out
    rows = weight + out.to(tl.int64)[:, None] * NUM_IN
    up_rows = rows + num_out * NUM_IN
    lanes = tl.arange(0, BLOCK_IN)
    tile, up_tile = _load_tiles(rows, up_rows, lanes, is_out, NUM_IN, ACTIVATION is not None)
    wait_for_inputs(OVERLAP)  # the weight does not depend on the kernels before this one
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT,), tl.float32)
    squares = tl.zeros((1,), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + lanes
        is_in = i < NUM_IN
        next_tile, next_up = _load_tiles(
            rows, up_rows, i + BLOCK_IN, is_out, NUM_IN, ACTIVATION is not None
        )
        values = add_update(total_out, residual, update, i, is_in)
        if norm_weight is not None:
            squares += tl.sum(values * values, 0)
            values *= tl.load(norm_weight + i, mask=is_in, other=0.0).to(tl.float32)
        sums += tl.sum(tile.to(tl.float32) * values[None, :], 1)
        if ACTIVATION is not None:
            up_sums += tl.sum(up_tile.to(tl.float32) * values[None, :], 1)
        tile = next_tile
        up_tile = next_up
    if norm_weight is not None:
        scale = tl.rsqrt(squares / NUM_IN + eps)
        sums *= scale
        up_sums *= scale
    if bias is not None:
        sums += tl.load(bias + out, mask=is_out, other=0.0)
        if ACTIVATION is not None:
            up_sums += tl.load(bias + num_out + out, mask=is_out, other=0.0)
    if ACTIVATION is not None:
        sums = activate(sums, ACTIVATION) * up_sums
    tl.store(y + out, sums.to(y.dtype.element_ty), mask=is_out)


@triton.jit
def _load_tiles(rows, up_rows, i, is_out, NUM_IN: tl.constexpr, IS_GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load some columns of rows of the weight, and of the rows of up where there is a gate."""
    mask = is_out[:, None] & (i < NUM_IN)[None, :]
    tile = tl.load(rows + i[None, :], mask=mask, other=0.0)
    up_tile = tile
    if IS_GATED:
        up_tile = tl.load(up_rows + i[None, :], mask=mask, other=0.0)
    return tile, up_tile


@triton.jit
def add_update(total_out, residual, update, i, is_in):  # type: ignore[no-untyped-def]
    """Return some inputs in float32; where there is an update, the first program stores the sum."""
    values = tl.load(residual + i, mask=is_in, other=0.0).to(tl.float32)
    if update is not None:
        values += tl.load(update + i, mask=is_in, other=0.0)
        rounded = values.to(total_out.dtype.element_ty)
        is_first = is_in & (tl.program_id(0) + 0 * i == 0)
        tl.store(total_out + i, rounded, mask=is_first)
        values = rounded.to(tl.float32)
    return values
