"""Products of many rows with weights in FP8 on CUDA: activations are rounded to FP8 as well.

A row has one scale, or one for every 128 inputs where the weight has; `quantise_rows` and
`quantised_product` in stored_weights.py say in plain torch what these compute. Codes of rows lie in
the order of the weight's, which is one that a product may have its inputs in.

With one scale a row, up to some hundred rows, the library multiplies codes, and whatever reads the
sums multiplies them by both scales: the library's product that does so itself splits no inputs, and
takes up to twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.fp8 import FP8, LARGEST_FP8, SMALLEST_SCALE, ScaledCodes
from nanovllm.kernels.cuda.elementwise import add_and_norm, count_splits, gate, scales_of
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.ops import Activation, Hidden, NormWeights, SumScales
from nanovllm.kernels.stored_weights import Fp8Weight, num_blocks

LARGEST = tl.constexpr(LARGEST_FP8)
SMALLEST = tl.constexpr(SMALLEST_SCALE)
MAX_SUM_ROWS = 256  # whose sums are scaled afterwards; of 512 and more the library does so as fast
MULTIPLE = 16  # of inputs, outputs and, with blocks, rows, which the library's product needs


@dataclass(frozen=True, slots=True)
class LibraryWeight:
    """A weight as the library's product takes it."""

    stored: Fp8Weight  # scales are those of outputs, or those of blocks [outputs / 128, blocks]
    one: Tensor  # float32: the scale of codes whose sums are scaled afterwards


def library_weight(weight: Fp8Weight) -> LibraryWeight | None:
    """The weight as the library's product takes it, if there is one for it."""
    num_out, num_in = weight.shape
    capability = torch.cuda.get_device_capability(weight.codes.device)
    one = torch.ones((), device=weight.codes.device)
    if not weight.has_blocks:
        is_known = num_out % MULTIPLE == 0 and capability >= (9, 0)
        return LibraryWeight(weight, one) if is_known else None
    # The library reads scales of inputs four blocks at a time.
    is_whole = num_out % 128 == num_blocks(num_in) % 4 == 0
    if not is_whole or capability != (9, 0) or _cuda_version() < (12, 9):
        return None
    blocks = weight.scales[::128].contiguous()
    is_even = torch.equal(blocks.repeat_interleave(128, 0), weight.scales)
    return LibraryWeight(Fp8Weight(weight.codes, blocks, num_in), one) if is_even else None


def fp8_many_rows(
    x: Tensor, weight: LibraryWeight, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """Quantise the rows of x [rows, in], and project them to [rows, out]."""
    rows = fp8_quantise(x, weight.stored.has_blocks)
    return _project(rows, weight, bias, activation, x.dtype)[: len(x)]


def fp8_after_norm(
    hidden: Hidden,
    norm: NormWeights,
    weight: LibraryWeight,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    """Like fp8_many_rows, of the norm of residual + update; the residual becomes that sum.

    The weight has no blocks.
    """
    rows = fp8_norm(hidden, norm)
    return _project(rows, weight, bias, activation, hidden.residual.dtype)


def fp8_add_to(residual: Tensor, x: Tensor, weight: LibraryWeight, bias: Tensor | None) -> Hidden:
    """Like fp8_many_rows, as an update of the residual, which the next norm may have to scale."""
    y, scales = _multiply(fp8_quantise(x, weight.stored.has_blocks), weight, bias, x.dtype)
    return Hidden(residual, y[: len(x)], scales)


def _project(
    rows: ScaledCodes,
    weight: LibraryWeight,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    y, scales = _multiply(rows, weight, bias, dtype)
    if activation is not None:
        return gate(y, activation, scales)
    if scales is not None:
        scale_sums(y, scales, None)
    return y


def _multiply(
    rows: ScaledCodes, weight: LibraryWeight, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, SumScales | None]:
    """The product or, with scales, sums of codes that are yet to be multiplied by them."""
    stored, one = weight.stored, weight.one
    is_scaled = stored.has_blocks or len(rows.codes) > MAX_SUM_ROWS
    y: Tensor = torch._scaled_mm(
        rows.codes,
        stored.codes.t(),
        scale_a=rows.scales if is_scaled else one,
        scale_b=stored.scales.t() if is_scaled else one,
        bias=bias if is_scaled else None,
        out_dtype=dtype,
        use_fast_accum=not stored.has_blocks,
    )
    if is_scaled:
        return y, None
    scales = SumScales(rows.scales, stored.scales)
    if bias is None:
        return y, scales
    scale_sums(y, scales, bias)
    return y, None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def scale_sums(sums: Tensor, scales: SumScales, bias: Tensor | None) -> None:
    """Multiply sums of codes [rows, out] by their scales in place, and add the bias."""
    num_rows, num_out = sums.shape
    block = 1024
    _scale_sums[(num_rows, triton.cdiv(num_out, block))](
        *(sums, scales.rows, scales.outputs, bias, num_out),
        BLOCK=block,
        num_warps=4,
        **launch_options(sums, num_rows),
    )


def fp8_quantise(x: Tensor, by_block: bool) -> ScaledCodes:
    """See quantise_rows, and order_codes for how the codes lie.

    With blocks, rows are padded to a multiple of 16, which hold anything, and their scales lie
    block by block, as the library wants them.
    """
    num_rows, num_in = x.shape
    num_scales = num_blocks(num_in) if by_block else 1
    padded = triton.cdiv(num_rows, MULTIPLE) * MULTIPLE if by_block else num_rows
    codes = torch.empty(padded, num_blocks(num_in) * 128, device=x.device, dtype=FP8)
    scales = torch.empty(num_scales, padded, device=x.device, dtype=torch.float32).t()
    block = max(128, triton.next_power_of_2(num_in))
    _quantise[(num_rows,)](
        codes,
        scales,
        x,
        padded,
        NUM_IN=num_in,
        NUM_CODES=codes.shape[1],
        NUM_SCALES=num_scales,
        BY_BLOCK=by_block,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(x, num_rows),
    )
    return ScaledCodes(codes, scales)


def fp8_norm(hidden: Hidden, norm: NormWeights) -> ScaledCodes:
    """The rows of the norm, each with a scale; see rms_norm and fp8_quantise."""
    residual, update = hidden.residual, hidden.update
    num_rows, dim = residual.shape
    num_codes = num_blocks(dim) * 128
    codes = torch.empty(num_rows, num_codes, device=residual.device, dtype=FP8)
    scales = torch.empty(num_rows, 1, device=residual.device, dtype=torch.float32)
    block = triton.next_power_of_2(num_codes)
    _norm[(num_rows,)](
        *(codes, scales, residual, update, scales_of(hidden.scales), norm.weight, norm.eps, dim),
        NUM_CODES=num_codes,
        BLOCK=block,
        NUM_SPLITS=count_splits(update),
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(residual, num_rows),
    )
    return ScaledCodes(codes, scales)


@triton.jit
def _scale_sums(  # type: ignore[no-untyped-def]
    sums,
    row_scales,
    output_scales,
    bias,
    num_out,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The grid is (rows, outputs)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_out
    scale = tl.load(output_scales + i, mask=mask, other=0.0)
    wait_for_inputs(OVERLAP)
    places = sums + row * num_out + i
    y = tl.load(places, mask=mask, other=0.0).to(tl.float32) * (tl.load(row_scales + row) * scale)
    if bias is not None:
        y += tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, y.to(sums.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("num_rows",))
def _quantise(  # type: ignore[no-untyped-def]
    codes,
    scales,
    x,
    num_rows,
    NUM_IN: tl.constexpr,
    NUM_CODES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program has one row."""
    row = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = BLOCK // 128 if BY_BLOCK else 1
    part = tl.arange(0, PARTS)
    place = part[:, None] * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)[None, :]
    i = _input_of(place)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * NUM_IN + i, mask=i < NUM_IN, other=0.0).to(tl.float32)
    scaled, scale = _scale(values)
    tl.store(scales + part * num_rows + row, scale, mask=part < NUM_SCALES)
    mask = place < NUM_CODES
    tl.store(codes + row * NUM_CODES + place, scaled.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    codes,
    scales,
    residual,
    update,
    update_scales,
    weight,
    eps,
    dim,
    NUM_CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program has one row."""
    place = tl.arange(0, BLOCK)
    i = _input_of(place)
    normed = add_and_norm(residual, update, update_scales, weight, eps, i, dim, NUM_SPLITS, OVERLAP)
    scaled, scale = _scale(normed.to(tl.float32)[None, :])
    row = tl.program_id(0).to(tl.int64)
    tl.store(scales + row + tl.arange(0, 1), scale)
    places = codes + row * NUM_CODES + place
    tl.store(places[None, :], scaled.to(codes.dtype.element_ty), mask=(place < NUM_CODES)[None, :])


@triton.jit
def _input_of(place):  # type: ignore[no-untyped-def]
    """The input whose code is at a place: see order_codes."""
    return place // 128 * 128 + place % 4 * 32 + place % 128 // 4


@triton.jit
def _scale(values):  # type: ignore[no-untyped-def]
    """Scale rows [rows, columns] to the range of codes; return also the scales."""
    largest = tl.max(tl.abs(values), 1)
    scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), SMALLEST)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return tl.clamp(values * inverse[:, None], -LARGEST, LARGEST), scale
