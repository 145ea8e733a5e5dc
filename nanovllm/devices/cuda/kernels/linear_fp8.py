"""FP8 GEMMs with many rows on CUDA (W8A8): activations are quantized to FP8 as well.

A row of activations has one scale, or one per 128 inputs if the weight has block-wise scales. Its
values are stored in the same permuted order as the weight's, which does not change the result.

With one scale per row and up to a few hundred rows, torch._scaled_mm multiplies unscaled values,
and a later kernel applies the scales of both operands. If torch._scaled_mm applied per-row scales,
it would not use split-K and would take up to twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.elementwise import (
    COLUMNS,
    act_and_mul,
    add_and_norm,
    count_splits,
    scales_of,
)
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.fp8 import FP8, LARGEST_FP8, SMALLEST_SCALE, Fp8Tensor
from nanovllm.ops.interface import Activation, DequantScales, NormWeights, ResidualStream
from nanovllm.ops.quantized_weight import FP8_WORDS, QuantizedWeight, num_blocks

LARGEST = tl.constexpr(LARGEST_FP8)
SMALLEST = tl.constexpr(SMALLEST_SCALE)
WORDS = tl.constexpr(FP8_WORDS)  # words per block of 128 inputs
# Up to this many rows, scales are applied after the GEMM; with 512 or more, that gains nothing.
MAX_SUM_ROWS = 256
# torch._scaled_mm requires multiples of this for inputs, outputs and, with block scales, rows.
MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class ScaledMMWeight:
    """A weight in the format of torch._scaled_mm."""

    stored: QuantizedWeight  # its scales are per-channel, or block-wise [outputs / 128, blocks]
    one: Tensor  # float32 1.0, passed as the scale if scales are applied after the GEMM


def scaled_mm_weight(weight: QuantizedWeight) -> ScaledMMWeight | None:
    """Return the weight in the format of torch._scaled_mm; None if it is not supported."""
    num_out, num_in = weight.shape
    capability = torch.cuda.get_device_capability(weight.qweight.device)
    one = torch.ones((), device=weight.qweight.device)
    if not weight.has_blocks:
        is_known = num_out % MULTIPLE == 0 and capability >= (9, 0)
        return ScaledMMWeight(weight, one) if is_known else None
    # cuBLAS reads four scales along the inputs at a time.
    is_whole = num_out % 128 == num_blocks(num_in) % 4 == 0
    if not is_whole or capability != (9, 0) or _cuda_version() < (12, 9):
        return None
    blocks = weight.scales[::128].contiguous()
    if not torch.equal(blocks.repeat_interleave(128, 0), weight.scales):
        return None
    return ScaledMMWeight(QuantizedWeight(8, weight.qweight, blocks, None, num_in), one)


def fp8_many_rows(
    x: Tensor, weight: ScaledMMWeight, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """Quantize the rows of x [rows, in], and project them to [rows, out]."""
    rows = fp8_quantize(x, weight.stored.has_blocks)
    return _project(rows, weight, bias, activation, x.dtype)[: len(x)]


def fp8_after_norm(
    hidden: ResidualStream,
    norm: NormWeights,
    weight: ScaledMMWeight,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    """Project RMSNorm(residual + update) like fp8_many_rows, and store the sum in the residual.

    The weight must not have block-wise scales.
    """
    rows = fp8_norm(hidden, norm)
    return _project(rows, weight, bias, activation, hidden.residual.dtype)


def fp8_add_to(
    residual: Tensor, x: Tensor, weight: ScaledMMWeight, bias: Tensor | None
) -> ResidualStream:
    """Return the residual with the projection of x as its update; the next norm applies scales."""
    y, scales = _multiply(fp8_quantize(x, weight.stored.has_blocks), weight, bias, x.dtype)
    return ResidualStream(residual, y[: len(x)], scales)


def _project(
    rows: Fp8Tensor,
    weight: ScaledMMWeight,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    y, scales = _multiply(rows, weight, bias, dtype)
    if activation is not None:
        return act_and_mul(y, activation, scales)
    if scales is not None:
        scale_sums(y, scales, None)
    return y


def _multiply(
    rows: Fp8Tensor, weight: ScaledMMWeight, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, DequantScales | None]:
    """Return the output of the GEMM, and the scales that remain to be applied to it, if any."""
    stored, one = weight.stored, weight.one
    is_scaled = stored.has_blocks or len(rows.values) > MAX_SUM_ROWS
    y: Tensor = torch._scaled_mm(
        rows.values,
        stored.fp8.t(),
        scale_a=rows.scales if is_scaled else one,
        scale_b=stored.scales.t() if is_scaled else one,
        bias=bias if is_scaled else None,
        out_dtype=dtype,
        use_fast_accum=not stored.has_blocks,
    )
    if is_scaled:
        return y, None
    scales = DequantScales(rows.scales, stored.scales)
    if bias is None:
        return y, scales
    scale_sums(y, scales, bias)
    return y, None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def scale_sums(sums: Tensor, scales: DequantScales, bias: Tensor | None) -> None:
    """Multiply an unscaled GEMM output [rows, out] by its scales in place, and add the bias."""
    num_rows, num_out = sums.shape
    _scale_sums[(num_rows, triton.cdiv(num_out, COLUMNS))](
        *(sums, scales.rows, scales.outputs, bias, num_out),
        num_warps=4,
        **launch_options(sums, num_rows),
    )


def fp8_quantize(x: Tensor, by_block: bool) -> Fp8Tensor:
    """Quantize rows to FP8, in the order of `pack_words`, scaled by their largest absolute value.

    With `by_block`, each block of 128 inputs has its own scale. As cuBLAS requires, the number of
    rows is then padded to a multiple of 16, with arbitrary values, and scales are stored block by
    block.
    """
    num_rows, num_in = x.shape
    num_scales = num_blocks(num_in) if by_block else 1
    padded = triton.cdiv(num_rows, MULTIPLE) * MULTIPLE if by_block else num_rows
    values = torch.empty(padded, num_blocks(num_in) * 128, device=x.device, dtype=FP8)
    scales = torch.empty(num_scales, padded, device=x.device, dtype=torch.float32).t()
    _quantize[(num_rows,)](
        values.view(torch.int32),
        scales,
        x,
        padded,
        NUM_IN=num_in,
        BY_BLOCK=by_block,
        num_warps=count_warps(num_in),
        **launch_options(x, num_rows),
    )
    return Fp8Tensor(values, scales)


def fp8_norm(hidden: ResidualStream, norm: NormWeights) -> Fp8Tensor:
    """Return RMSNorm(residual + update) in FP8 with a scale per row; update the residual."""
    residual, update = hidden.residual, hidden.update
    num_rows, dim = residual.shape
    values = torch.empty(num_rows, num_blocks(dim) * 128, device=residual.device, dtype=FP8)
    scales = torch.empty(num_rows, 1, device=residual.device, dtype=torch.float32)
    _norm[(num_rows,)](
        *(values.view(torch.int32), scales, residual, update, scales_of(hidden.scales)),
        *(norm.weight, norm.eps, dim),
        NUM_BLOCKS=num_blocks(dim),
        NUM_SPLITS=count_splits(update),
        num_warps=count_warps(dim),
        **launch_options(residual, num_rows),
    )
    return Fp8Tensor(values, scales)


@triton.jit
def _scale_sums(  # type: ignore[no-untyped-def]
    sums,
    row_scales,
    output_scales,
    bias,
    num_out,
    OVERLAP: tl.constexpr,
):
    """Scale a block of one row in place; the grid is (rows, outputs)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = i < num_out
    scale = tl.load(output_scales + i, mask=mask, other=0.0)
    wait_for_inputs(OVERLAP)
    pointers = sums + row * num_out + i
    y = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * (tl.load(row_scales + row) * scale)
    if bias is not None:
        y += tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, y.to(sums.dtype.element_ty), mask=mask)


def count_warps(num_in: int) -> int:
    """Return the number of warps that gives each thread four words, or more in long rows."""
    return min(max(triton.next_power_of_2(num_blocks(num_in)) * FP8_WORDS // 128, 1), 16)


@triton.jit(do_not_specialize=("num_rows",))
def _quantize(  # type: ignore[no-untyped-def]
    words,
    scales,
    x,
    num_rows,
    NUM_IN: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Quantize one row per CTA."""
    row = tl.program_id(0).to(tl.int64)
    NUM_BLOCKS: tl.constexpr = triton.cdiv(NUM_IN, 128)
    i = tl.arange(0, triton.next_power_of_2(NUM_BLOCKS) * 128)
    wait_for_inputs(OVERLAP)
    values = _by_word(tl.load(x + row * NUM_IN + i, mask=i < NUM_IN, other=0.0).to(tl.float32))
    if BY_BLOCK:
        part = tl.arange(0, triton.next_power_of_2(NUM_BLOCKS))
        scale = _scale_of(tl.max(tl.max(tl.abs(values), 2), 1))
        tl.store(scales + part * num_rows + row, scale, mask=part < NUM_BLOCKS)
        _store_fp8(words, row, values, scale[:, None, None], NUM_BLOCKS)
    else:
        scale = _scale_of(tl.max(tl.abs(values)))
        tl.store(scales + row, scale)
        _store_fp8(words, row, values, scale, NUM_BLOCKS)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    words,
    scales,
    residual,
    update,
    update_scales,
    weight,
    eps,
    dim,
    NUM_BLOCKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add, normalize and quantize one row per CTA."""
    i = tl.arange(0, triton.next_power_of_2(NUM_BLOCKS) * 128)
    normed = add_and_norm(residual, update, update_scales, weight, eps, i, dim, NUM_SPLITS, OVERLAP)
    values = _by_word(normed.to(tl.float32))
    row = tl.program_id(0).to(tl.int64)
    scale = _scale_of(tl.max(tl.abs(values)))
    tl.store(scales + row, scale)
    _store_fp8(words, row, values, scale, NUM_BLOCKS)


@triton.jit
def _by_word(values):  # type: ignore[no-untyped-def]
    """Reshape the values of whole blocks to [blocks, positions, words]; see pack_words.

    A thread holds one position of neighboring words. If it held all of them, ptxas 12.8 would
    miscompile what Triton 3.7 makes of `_store_fp8`.
    """
    return tl.reshape(values, [values.shape[0] // 128, 4, WORDS])


@triton.jit
def _scale_of(largest):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST)


@triton.jit
def _store_fp8(words, row, values, scale, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize values [blocks, positions, words] to FP8, and store them as the words of a row."""
    inverse = tl.div_rn(1.0, scale)
    scaled = tl.clamp(values * inverse, -LARGEST, LARGEST)
    bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    joined = tl.sum(bits << (8 * tl.arange(0, 4)[None, :, None]), 1)
    part = tl.arange(0, values.shape[0])[:, None]
    pointers = words + row * (NUM_BLOCKS * WORDS) + part * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(pointers, joined, mask=part < NUM_BLOCKS)
