"""What products in tiles share: the rows of the weight that a tile has, and where its sums go.

The weight is the left operand of tensor cores: its rows, of which there are many, fill them however
few rows x has. A gated tile has rows of gate, then the same rows of up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.cuda.elementwise import activate


def shared_bytes(device: torch.device) -> int:
    """The shared memory that one program may take."""
    if device.type != "cuda":
        return 1 << 16
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - 8192


def fit_stages(num_stages: int, stage_bytes: int, device: torch.device) -> int:
    """So many stages of a loop as are wanted, or as shared memory holds."""
    return max(1, min(num_stages, shared_bytes(device) // stage_bytes))


def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tile_rows(tile, num_out, BLOCK_OUT: tl.constexpr, IS_GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of the weight that a tile has, and which of them there are."""
    if IS_GATED:
        both = tl.arange(0, 2 * BLOCK_OUT)
        out = tile * BLOCK_OUT + both % BLOCK_OUT
        return out + both // BLOCK_OUT * num_out, out < num_out
    else:
        out = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        return out, out < num_out


@triton.jit
def add_bias(sums, bias, rows, is_row, is_added):  # type: ignore[no-untyped-def]
    """Add the bias of some rows of the weight to sums [rows of the weight, rows of x]."""
    if bias is not None:
        mask = is_row & (is_added | (rows < 0))  # a mask has the shape of what it masks
        sums += tl.load(bias + rows, mask=mask, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    y, sums, tile, targets, is_target, num_out, BLOCK_OUT: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Apply the gate, if any, and store sums as a tile's outputs of rows of y [rows, num_out]."""
    if ACTIVATION is not None:
        gate, up = tl.split(sums.reshape(2, BLOCK_OUT, sums.shape[1]).permute(1, 2, 0))
        sums = activate(gate, ACTIVATION) * up
    outs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    places = y + targets[None, :] * num_out + outs[:, None]
    mask = is_target[None, :] & (outs < num_out)[:, None]
    tl.store(places, sums.to(y.dtype.element_ty), mask=mask)
