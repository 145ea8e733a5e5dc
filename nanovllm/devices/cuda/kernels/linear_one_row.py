"""GEMV on CUDA: projections of one row by a dense weight, bound by the time to read it once.

The RMSNorm before the projection and the gated activation after it are fused with it: a CTA scales
its outputs by 1 / RMS once it has read the whole row. Each tile of the weight is loaded while the
previous one is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.dequantize import load_tile
from nanovllm.devices.cuda.kernels.elementwise import activate
from nanovllm.devices.cuda.kernels.linear_tiles import tile_rows
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import Activation, NormWeights, ResidualStream


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    block_out: int  # outputs per CTA
    block_in: int  # inputs in a tile
    num_warps: int


def one_row_linear(
    hidden: ResidualStream,
    norm: NormWeights | None,
    weight: Tensor,  # [out, in], contiguous; with an activation: gate rows, then up rows
    bias: Tensor | None,
    activation: Activation | None,
) -> tuple[Tensor, Tensor]:
    """Project residual + update [1, in], normalized if `norm` is given; also return the sum."""
    residual, update = hidden.residual, hidden.update
    num_rows, num_in = weight.shape
    assert residual.shape == (1, num_in), residual.shape
    assert update is None or update.shape == residual.shape, "partial sums of one row"
    assert hidden.scales is None, "unscaled sums of one row"
    assert norm is not None or update is None, "an update is added by the norm that follows"
    num_out = num_rows if activation is None else num_rows // 2
    y = torch.empty(1, num_out, device=residual.device, dtype=residual.dtype)
    total = residual if update is None else torch.empty_like(residual)
    config = one_row_config(weight, activation is not None)
    _one_row[(triton.cdiv(num_out, config.block_out),)](
        *(y, (total, residual, update), None if norm is None else (norm.weight, norm.eps)),
        *(weight, bias, num_out),
        NUM_IN=num_in,
        BLOCK_IN=config.block_in,
        BLOCK_OUT=config.block_out,
        ACTIVATION=activation,
        num_warps=config.num_warps,
        **launch_options(residual, 1),
    )
    return y, total


def one_row_config(weight: Tensor, is_gated: bool) -> OneRowConfig:
    num_rows, num_in = weight.shape
    num_out, block_in = num_rows // 2 if is_gated else num_rows, triton.next_power_of_2(num_in)
    if num_in >= 4096:
        return OneRowConfig(2, 4096, 4 if is_gated else 8)
    if num_out <= 2048:
        return OneRowConfig(2, min(block_in, 2048), 4)
    if num_in == 2048 and not is_gated:
        return OneRowConfig(4, block_in, 4)
    return OneRowConfig(8 if num_out <= 4096 and not is_gated else 4, min(block_in, 1024), 4)


@triton.jit
def _one_row(  # type: ignore[no-untyped-def]
    y,
    source,
    norms,
    weight,
    bias,
    num_out,
    NUM_IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_OUT outputs; `source` is (sum to store, residual, update)."""
    CHUNKS: tl.constexpr = (NUM_IN + BLOCK_IN - 1) // BLOCK_IN
    IS_GATED: tl.constexpr = ACTIVATION is not None
    lanes = tl.arange(0, BLOCK_IN)
    rows, is_row = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, False)
    tile = load_tile(weight, rows, is_row, lanes, NUM_IN)
    if IS_GATED:
        up_weight = weight + num_out * NUM_IN
        up_tile = load_tile(up_weight, rows, is_row, lanes, NUM_IN)
    wait_for_inputs(OVERLAP)  # after loading the weight, which no kernel writes
    total_squares = 0.0
    if CHUNKS == 1:
        inputs, squares = _load_inputs(source, norms, lanes, NUM_IN)
        total_squares = tl.sum(squares, 0)
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    up_sums = sums
    for chunk in tl.range(0, CHUNKS):
        next_inputs = (chunk + 1) * BLOCK_IN + lanes
        next_tile = load_tile(weight, rows, is_row, next_inputs, NUM_IN)
        if IS_GATED:
            next_up = load_tile(up_weight, rows, is_row, next_inputs, NUM_IN)
        if CHUNKS > 1:
            inputs, squares = _load_inputs(source, norms, chunk * BLOCK_IN + lanes, NUM_IN)
            if norms is not None:
                total_squares += tl.sum(squares, 0)
        sums += tl.sum(tile.to(tl.float32) * inputs[None, :], 1)
        tile = next_tile
        if IS_GATED:
            up_sums += tl.sum(up_tile.to(tl.float32) * inputs[None, :], 1)
            up_tile = next_up
    scale = 1.0 if norms is None else tl.rsqrt(total_squares / NUM_IN + norms[1])
    sums *= scale
    if bias is not None:
        sums += tl.load(bias + rows, mask=is_row, other=0.0)
    if IS_GATED:
        up_sums *= scale
        if bias is not None:
            up_sums += tl.load(bias + num_out + rows, mask=is_row, other=0.0)
        sums = activate(sums, ACTIVATION) * up_sums
    tl.store(y + rows, sums.to(y.dtype.element_ty), mask=is_row)


@triton.jit
def _load_inputs(source, norms, i, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inputs times the norm's weight, and the squares of the inputs."""
    is_in = i < NUM_IN
    values = tl.load(source[1] + i, mask=is_in, other=0.0).to(tl.float32)
    if source[2] is not None:  # the first CTA stores the sum
        values += tl.load(source[2] + i, mask=is_in, other=0.0)
        rounded = values.to(source[0].dtype.element_ty)
        tl.store(source[0] + i, rounded, mask=is_in & (tl.program_id(0) + 0 * i == 0))
        values = rounded.to(tl.float32)
    squares = values * values
    if norms is not None:
        values *= tl.load(norms[0] + i, mask=is_in, other=0.0)
    return values, squares
