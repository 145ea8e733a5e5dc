"""Tiles of a GEMM: select the weight rows of a tile, multiply them by x, and store the outputs.

The weight is the left operand (M) of the MMA: its many rows fill M, however few rows x has. A gated
tile consists of some rows of gate, followed by the same rows of up. dequantize.py defines words,
positions and LANES.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.devices.cuda.kernels.dequantize import as_operands, int4_offset, join_positions
from nanovllm.devices.cuda.kernels.elementwise import activate


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory available to one CTA in bytes, minus a reserve of 8 KiB."""
    if device.type != "cuda":
        return 1 << 16
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - 8192


def fit_stages(num_stages: int, stage_bytes: int, device: torch.device) -> int:
    """Return how many pipeline stages fit into shared memory, at most `num_stages`."""
    return max(1, min(num_stages, shared_bytes(device) // stage_bytes))


def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tile_rows(tile, num_out, BLOCK_OUT: tl.constexpr, IS_GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weight rows of a tile, and a mask of those that exist."""
    if IS_GATED:
        both = tl.arange(0, 2 * BLOCK_OUT)
        out = tile * BLOCK_OUT + both % BLOCK_OUT
        return out + both // BLOCK_OUT * num_out, out < num_out
    else:
        out = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        return out, out < num_out


@triton.jit
def multiply_tile(  # type: ignore[no-untyped-def]
    weight,
    stored,
    w_rows,
    is_out,
    x_start,
    is_row,
    first,
    end,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Multiply a tile of weight rows by a tile of rows of x, over the words [first, end) of K.

    For a dense weight, COUNT is the number of words, since the loop is fast only if its length is a
    constant. `stored` holds the scales and zero points of a quantized weight.
    """
    if LANES > 0:
        return _multiply_quantized(
            *(weight, stored, w_rows, is_out, x_start, is_row, first, end),
            *(NUM_IN, NUM_WORDS, LANES, GROUP, IS_EVEN),
        )
    else:
        w_start = weight + first + w_rows.to(tl.int64)[:, None] * NUM_IN
        x_start += first
        sums = tl.zeros((w_rows.shape[0], is_row.shape[0]), tl.float32)
        for begin in tl.range(0, COUNT, BLOCK_IN):
            i = begin + tl.arange(0, BLOCK_IN)
            if IS_EVEN:
                w_tile = tl.load(w_start + i[None, :])
                x_tile = tl.load(x_start + i[:, None], mask=is_row[None, :], other=0.0)
            else:
                is_in = i < NUM_IN - first
                w_mask = is_out[:, None] & is_in[None, :]
                w_tile = tl.load(w_start + i[None, :], mask=w_mask, other=0.0)
                x_mask = is_row[None, :] & is_in[:, None]
                x_tile = tl.load(x_start + i[:, None], mask=x_mask, other=0.0)
            sums = tl.dot(w_tile, x_tile, sums, input_precision="ieee")
        return sums


@triton.jit
def _multiply_quantized(  # type: ignore[no-untyped-def]
    words,
    stored,
    w_rows,
    is_out,
    x_start,
    is_row,
    first,
    end,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Multiply a quantized weight by x; scales are applied to the sums over quant groups.

    Scaling the weights first would force the MMA operand through shared memory. Scales are loaded
    one block of 128 inputs ahead: loads narrower than a word are not pipelined, so the loop would
    otherwise wait for them.
    """
    POSITIONS: tl.constexpr = 128 // LANES
    PARTS: tl.constexpr = 128 // GROUP if GROUP > 0 else 1  # quant groups per block of inputs
    # Packed-value positions per `tl.dot`. With group-wise scales, all positions of a quant group go
    # into a single `tl.dot`: a group's sums cannot be scaled until its MMAs finish, and this way
    # the loop waits once per group.
    JOINED: tl.constexpr = POSITIONS // PARTS if GROUP > 0 else 1
    NUM_GROUPS: tl.constexpr = NUM_WORDS // LANES * PARTS if GROUP > 0 else 1
    dtype: tl.constexpr = x_start.dtype.element_ty
    lanes = tl.arange(0, LANES)
    w_start = words + w_rows.to(tl.int64)[:, None] * NUM_WORDS
    s_start = w_rows.to(tl.int64) * NUM_GROUPS
    sums = tl.zeros((w_rows.shape[0], is_row.shape[0]), tl.float32)
    group = first // LANES * PARTS if GROUP > 0 else 0
    scale, less = _load_groups(stored, s_start, is_out, group, NUM_GROUPS, PARTS, dtype)
    for word in tl.range(first, end, LANES):
        if IS_EVEN:
            tile = tl.load(w_start + (word + lanes)[None, :])
        else:
            tile = tl.load(w_start + (word + lanes)[None, :], mask=is_out[:, None], other=0)
        next_scale, next_less = scale, less
        if GROUP > 0:
            after = (word // LANES + 1) * PARTS
            next_scale, next_less = _load_groups(
                stored, s_start, is_out, after, NUM_GROUPS, PARTS, dtype
            )
        values = as_operands(tile, POSITIONS, dtype)
        if POSITIONS == 8:  # int4 values: `less` is -(offset + zero point)
            lowered = ()
            for n in tl.static_range(POSITIONS):
                lowered += (values[n] + less[n * PARTS // POSITIONS],)  # type: ignore[assignment]
            values = lowered
        for part in tl.static_range(PARTS):
            products = sums if GROUP == 0 else tl.zeros_like(sums)
            for n in tl.static_range(
                part * POSITIONS // PARTS, (part + 1) * POSITIONS // PARTS, JOINED
            ):
                i = word * POSITIONS + LANES * n + tl.arange(0, LANES * JOINED)
                mask = is_row[None, :]
                if NUM_IN % 128 != 0:
                    mask = mask & (i < NUM_IN)[:, None]
                x_tile = tl.load(x_start + i[:, None], mask=mask, other=0.0)
                products = tl.dot(join_positions(values, n, JOINED), x_tile, products)
            sums = products if GROUP == 0 else sums + products * scale[part]
        scale, less = next_scale, next_less
    return sums * scale[0] if GROUP == 0 else sums


@triton.jit
def _load_groups(  # type: ignore[no-untyped-def]
    stored,
    s_start,
    is_out,
    group,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the scales of the quant groups of a block of 128 inputs; `group` is the first.

    Also return -(offset + zero point) of each group, which is used for int4 values only.
    """
    is_there = is_out & (group < NUM_GROUPS)  # false beyond the last block
    scales, less = (), ()
    for part in tl.static_range(PARTS):
        offsets = s_start + group + part
        scale = tl.load(stored[0] + offsets, mask=is_there, other=0.0).to(tl.float32)
        scales += (scale[:, None],)  # type: ignore[assignment]
        if stored[1] is None:
            less += (tl.full((1, 1), -int4_offset(dtype) - 8.0, dtype),)  # type: ignore[assignment]
        else:
            zero = tl.load(stored[1] + offsets, mask=is_there, other=0).to(tl.float32)
            less += ((-int4_offset(dtype) - zero).to(dtype)[:, None],)  # type: ignore[assignment]
    return scales, less


@triton.jit
def add_bias(sums, bias, rows, is_row, is_added):  # type: ignore[no-untyped-def]
    """Add the bias of some weight rows to sums [weight rows, rows of x], if `is_added`."""
    if bias is not None:
        mask = is_row & (is_added | (rows < 0))  # `rows < 0` is false; it broadcasts `is_added`
        sums += tl.load(bias + rows, mask=mask, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    y, sums, tile, targets, is_target, num_out, BLOCK_OUT: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Apply the gated activation, if any, and store a tile's outputs in y [rows, num_out]."""
    if ACTIVATION is not None:
        gate, up = tl.split(sums.reshape(2, BLOCK_OUT, sums.shape[1]).permute(1, 2, 0))
        sums = activate(gate, ACTIVATION) * up
    outs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    pointers = y + targets[None, :] * num_out + outs[:, None]
    mask = is_target[None, :] & (outs < num_out)[:, None]
    tl.store(pointers, sums.to(y.dtype.element_ty), mask=mask)
