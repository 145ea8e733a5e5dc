"""Projections of a few rows on CUDA, where reading the weight is what takes the time.

A program multiplies 64 lines of the weight, or a part of them, with every row at once. Where that
makes too few programs to fill the device, the inputs are split into parts: each gives a summand in
float32, and the RMSNorm that comes next adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.pdl import launch_options, prefetch_lines, wait_for_inputs
from nanovllm.kernels.ops import Activation

LINES = 64  # of the weight in one program: what a tensor core instruction takes
NUM_PROGRAMS = 128  # that fill a device
MAX_PARTS = 4
# Beyond them cuBLAS is faster, or beyond the first alone where the norm finishes the sum; there
# a small weight pays for more rows, too.
MAX_ROWS, MAX_BYTES = 64, 32 << 20  # of x, of the weight
MAX_SPLIT_ROWS, MAX_SPLIT_BYTES = 256, 6 << 20
NUM_PREFETCHED = tl.constexpr(256)  # inputs of each line that are asked for early
LINE_ELEMENTS = tl.constexpr(64)  # of 16 bits in a cache line


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    num_rows: int  # of x in one program
    tile: int  # inputs per step of the loop
    num_stages: int


def few_rows_config(num_rows: int, num_in: int, x: Tensor) -> FewRowsConfig:
    """Keep as much of the weight on its way as shared memory holds."""
    block = min(max(16, triton.next_power_of_2(num_rows)), 128)
    tile = 64
    stage_bytes = (LINES + block) * tile * x.itemsize
    return FewRowsConfig(
        block, tile, min(8, shared_bytes(x.device) // stage_bytes, num_in // tile + 1)
    )


def shared_bytes(device: torch.device) -> int:
    """What one program may hold."""
    if device.type != "cuda":
        return 1 << 16
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - 8192


def has_few_rows(num_rows: int, weight: Tensor) -> bool:
    """Whether this kernel beats cuBLAS, which takes its time to start but reads faster."""
    return num_rows <= MAX_ROWS and weight.nbytes <= MAX_BYTES


def choose_parts(num_rows: int, weight: Tensor) -> int:
    """Into how many parts to split the inputs to fill the device: a power of two."""
    is_small = num_rows <= MAX_SPLIT_ROWS and weight.nbytes <= MAX_SPLIT_BYTES
    if num_rows == 1 or not (is_small or num_rows <= MAX_ROWS):
        return 1
    num_out, num_in = weight.shape
    wanted = NUM_PROGRAMS * LINES // num_out
    most = max(1, min(wanted, MAX_PARTS, num_in // 128))
    return 1 << (most.bit_length() - 1)


def few_rows_linear(
    x: Tensor,  # [rows, in], contiguous
    weight: Tensor,  # [out, in], contiguous; gated: gate, then up
    bias: Tensor | None,
    activation: Activation | None,
    num_parts: int = 1,
    config: FewRowsConfig | None = None,
) -> Tensor:
    """Project x; more than one part: float32 [parts, rows, out], whose sum is the result."""
    num_rows, num_in = x.shape
    config = config or few_rows_config(num_rows, num_in // num_parts, x)
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    shape = (num_rows, num_out) if num_parts == 1 else (num_parts, num_rows, num_out)
    dtype = x.dtype if num_parts == 1 else torch.float32
    assert num_parts == 1 or activation is None
    y = torch.empty(shape, device=x.device, dtype=dtype)
    lines = LINES if activation is None else LINES // 2
    grid = triton.cdiv(num_out, lines), triton.cdiv(num_rows, config.num_rows), num_parts
    _few_rows[grid](
        y,
        x,
        weight,
        bias,
        num_rows,
        num_out,
        NUM_IN=num_in,
        PART=triton.cdiv(num_in, num_parts * config.tile) * config.tile,
        ROWS=config.num_rows,
        LINES=lines,
        TILE=config.tile,
        ACTIVATION=activation,
        IS_EVEN=num_out % lines == 0 and num_in % (num_parts * config.tile) == 0,
        num_warps=4,
        num_stages=config.num_stages,
        **launch_options(x, num_rows),
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))  # one kernel serves all batches up to ROWS
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    bias,
    num_rows,
    num_out,
    NUM_IN: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The weight's lines are the left operand: they fill the tensor cores, however few rows."""
    first = tl.program_id(2) * PART
    outs = tl.program_id(0) * LINES + tl.arange(0, LINES)
    lines = outs
    if ACTIVATION is not None:  # a tile of gate lines, then the same ones of up
        places = tl.arange(0, 2 * LINES)
        outs = tl.program_id(0) * LINES + places % LINES
        lines = outs + places // LINES * num_out
    line_places = weight + first + lines.to(tl.int64)[:, None] * NUM_IN
    is_line = (outs < num_out)[:, None]
    inputs = tl.arange(0, TILE)
    if OVERLAP and IS_EVEN:
        # The weight does not depend on the kernels before this one: it is on its way meanwhile.
        for begin in tl.range(0, min(PART, NUM_PREFETCHED), LINE_ELEMENTS):
            prefetch_lines(line_places + begin)
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[None, :]
    row_places = x + first + rows[None, :] * NUM_IN
    acc = tl.zeros((lines.shape[0], ROWS), tl.float32)
    for begin in tl.range(0, PART, TILE):
        i = begin + inputs
        if IS_EVEN:
            w_tile = tl.load(line_places + i[None, :])
            x_tile = tl.load(row_places + i[:, None], mask=is_row, other=0.0)
        else:
            is_in = first + i < NUM_IN
            w_tile = tl.load(line_places + i[None, :], mask=is_line & is_in[None, :], other=0.0)
            x_tile = tl.load(row_places + i[:, None], mask=is_row & is_in[:, None], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
    if bias is not None:
        values = tl.load(bias + lines, mask=(outs < num_out) & (first + 0 * outs == 0), other=0.0)
        acc += values.to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(acc.reshape(2, LINES, ROWS).permute(1, 2, 0))
        acc = activate(gate, ACTIVATION) * up
    outs = tl.program_id(0) * LINES + tl.arange(0, LINES)
    places = y + (tl.program_id(2) * num_rows + rows)[None, :] * num_out + outs[:, None]
    tl.store(places, acc.to(y.dtype.element_ty), mask=is_row & (outs < num_out)[:, None])
