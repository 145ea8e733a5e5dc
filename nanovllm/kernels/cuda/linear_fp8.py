"""Products of many rows with weights in FP8 on CUDA: activations are rounded to FP8 as well.

A row has one scale, or one for every 128 inputs where the weight has; `quantise_rows` and
`quantised_product` in stored_weights.py say in plain torch what these compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.fp8 import FP8, LARGEST_FP8, SMALLEST_SCALE, ScaledCodes
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.stored_weights import Fp8Weight, num_blocks

LARGEST = tl.constexpr(LARGEST_FP8)
SMALLEST = tl.constexpr(SMALLEST_SCALE)
MULTIPLE = 16  # of inputs, outputs and, with blocks, rows, which the library's product needs


def fp8_many_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Quantise the rows of x [rows, in], and project them to [rows, out].

    Scales of the weight are those of outputs, or those of blocks [outputs / 128, blocks].
    """
    rows = fp8_quantise(x, weight.has_blocks)
    y: Tensor = torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=not weight.has_blocks,
    )
    return y[: len(x)]


def library_weight(weight: Fp8Weight) -> Fp8Weight | None:
    """The weight as the library's product takes it, if there is one for it."""
    num_out, num_in = weight.shape
    capability = torch.cuda.get_device_capability(weight.codes.device)
    if not weight.has_blocks:
        is_whole = num_out % MULTIPLE == num_in % MULTIPLE == 0
        return weight if is_whole and capability >= (9, 0) else None
    # The library reads scales of inputs four blocks at a time.
    is_whole = num_out % 128 == num_in % 512 == 0
    if not is_whole or capability != (9, 0) or _cuda_version() < (12, 9):
        return None
    blocks = weight.scales[::128].contiguous()
    is_even = torch.equal(blocks.repeat_interleave(128, 0), weight.scales)
    return Fp8Weight(weight.codes, blocks) if is_even else None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def fp8_quantise(x: Tensor, by_block: bool) -> ScaledCodes:
    """See quantise_rows; with blocks, rows are padded to a multiple of 16, which hold anything.

    Their scales then lie block by block, as the library wants them.
    """
    num_rows, num_in = x.shape
    num_scales = num_blocks(num_in) if by_block else 1
    padded = triton.cdiv(num_rows, MULTIPLE) * MULTIPLE if by_block else num_rows
    codes = torch.empty(padded, num_in, device=x.device, dtype=FP8)
    scales = torch.empty(num_scales, padded, device=x.device, dtype=torch.float32).t()
    block = max(128, triton.next_power_of_2(num_in))
    _quantise[(num_rows,)](
        codes,
        scales,
        x,
        padded,
        NUM_IN=num_in,
        NUM_SCALES=num_scales,
        BY_BLOCK=by_block,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(x, num_rows),
    )
    return ScaledCodes(codes, scales)


def fp8_widen(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in a dtype of 16 bits."""
    num_out, num_in = weight.shape
    y = torch.empty(num_out, num_in, device=weight.codes.device, dtype=dtype)
    num_scales, block = weight.scales.shape[1], 1024
    _widen[(triton.cdiv(num_in, block), num_out)](
        y, weight.codes, weight.scales, num_in, NUM_SCALES=num_scales, BLOCK=block, num_warps=4
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))
def _quantise(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    num_rows,
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
    largest = tl.max(tl.abs(values), 1)
    scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), SMALLEST)
    tl.store(scales + part * num_rows + row, scale, mask=part < NUM_SCALES)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    scaled = tl.clamp(values * inverse[:, None], -LARGEST, LARGEST)
    tl.store(codes + row * NUM_IN + i, scaled.to(codes.dtype.element_ty), mask=i < NUM_IN)


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
