"""GEMV on CUDA: projections of one row, dominated by the time to read the weight once.

The RMSNorm before and the gated activation after the projection are fused into the kernel: a CTA
scales its outputs by 1 / RMS once it has read the whole row. Each tile of the weight is loaded
while the previous one is used. dequantize.py defines words, positions and LANES.

A quantized weight is dequantized in registers, and scales are applied to the sums over quant
groups. Each CTA first has to prepare the row of inputs, which is slow. So there are just enough
CTAs to fill the device, and each computes several tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.dequantize import (
    IS_INTERPRETED,
    CudaWeight,
    as_floats,
    load_tile,
    weight_arguments,
    weight_sizes,
)
from nanovllm.devices.cuda.kernels.elementwise import activate
from nanovllm.devices.cuda.kernels.linear_tiles import num_processors, tile_rows
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import Activation, NormWeights, ResidualStream
from nanovllm.ops.quantized_weight import QuantizedWeight

# The int4 values v_n at positions n = 0 to 4 occupy the low 20 bits of a word, all of them mantissa
# bits of a float32. With all other bits cleared, the word reinterpreted as float32 is the subnormal
# number v_n * 2**(4 * n - 149). Inputs are scaled up to compensate. Positions 5 to 7 are first
# shifted down by 12 bits.
RAISE = tl.constexpr(100)  # inputs are scaled by up to 2**100: inputs up to 2**27 stay finite
LOWER = tl.constexpr(2.0**49)  # the remaining factor, applied to the sums: 100 + 49 = 149


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    block_out: int  # rows of the weight in a tile
    block_in: int  # inputs in a tile
    num_warps: int
    ctas_per_sm: int | None  # None: one CTA per tile


def one_row_linear(
    hidden: ResidualStream,
    norm: NormWeights | None,
    weight: CudaWeight,
    bias: Tensor | None,
    activation: Activation | None,
    config: OneRowConfig | None = None,
    normed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Project residual + update [1, in], normalized if `norm` is given; also return the sum.

    The normalized row is stored in `normed` if that is given; this requires a dense weight.
    """
    residual, update = hidden.residual, hidden.update
    num_rows, num_in = weight.shape
    assert residual.shape == (1, num_in), residual.shape
    assert update is None or update.shape == residual.shape, "partial sums are not supported"
    assert normed is None or (norm is not None and isinstance(weight, Tensor))
    assert hidden.scales is None, "an unscaled update is not supported"
    assert norm is not None or update is None, "an update requires a norm"
    num_out = num_rows if activation is None else num_rows // 2
    y = torch.empty(1, num_out, device=residual.device, dtype=out_dtype or residual.dtype)
    total = residual if update is None else torch.empty_like(residual)
    config = config or one_row_config(weight, norm is not None, activation is not None)
    block_out = config.block_out if activation is None else config.block_out // 2
    grid = triton.cdiv(num_out, block_out)
    if config.ctas_per_sm is not None:
        grid = min(grid, config.ctas_per_sm * num_processors(residual.device))
    sizes = weight_sizes(weight)
    _one_row[(grid,)](
        *(y, (total, residual, update, normed), None if norm is None else (norm.weight, norm.eps)),
        *(*weight_arguments(weight), bias, num_out),
        **sizes,
        BLOCK_WORDS=config.block_in * (sizes["LANES"] or 128) // 128,
        BLOCK_OUT=block_out,
        ACTIVATION=activation,
        HAS_ONE_TILE=config.ctas_per_sm is None,
        num_warps=config.num_warps,
        **launch_options(residual, 1),
    )
    return y, total


def one_row_config(weight: CudaWeight, has_norm: bool, is_gated: bool) -> OneRowConfig:
    num_rows, num_in = weight.shape
    if isinstance(weight, QuantizedWeight):
        return _quantized_config(weight, has_norm)
    num_out, block_in = num_rows // 2 if is_gated else num_rows, triton.next_power_of_2(num_in)
    if num_in >= 4096:
        block_out, block_in, num_warps = 2, 4096, 4 if is_gated else 8
    elif num_out <= 2048:
        block_out, block_in, num_warps = 2, min(block_in, 2048), 4
    elif num_in == 2048 and not is_gated:
        block_out, num_warps = 4, 4
    else:
        block_in, num_warps = min(block_in, 1024), 4
        block_out = 8 if num_out <= 4096 and not is_gated else 4
    return OneRowConfig(2 * block_out if is_gated else block_out, block_in, num_warps, None)


def _quantized_config(weight: QuantizedWeight, has_norm: bool) -> OneRowConfig:
    """Return a config tuned for Qwen3-8B on an H200; with a norm, tiles have whole weight rows."""
    num_rows, num_in = weight.shape
    block_in = max(128, triton.next_power_of_2(num_in))
    block_in = block_in if has_norm else min(block_in, 4096)
    num_warps = max(4, block_in // 1024)
    if weight.bits == 4:
        return OneRowConfig(16 if has_norm and num_rows <= 8192 else 8, block_in, num_warps, 4)
    if has_norm:
        return OneRowConfig(4, block_in, num_warps, 4)
    is_whole = block_in >= num_in
    return OneRowConfig(4, block_in, 8, 4) if is_whole else OneRowConfig(4, 2048, 4, 8)


@triton.jit
def _one_row(  # type: ignore[no-untyped-def]
    y,
    source,
    norms,
    weight,
    stored,
    bias,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_ONE_TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute this CTA's tiles of outputs.

    `source` holds four pointers: where to store residual + update, the residual, the update (or
    None), and where to store the normalized row (or None).
    """
    CHUNKS: tl.constexpr = (NUM_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    # A gated tile has gate rows, then up rows. With a dense weight, gate and up are separate tiles.
    HAS_UP: tl.constexpr = HAS_ONE_TILE and ACTIVATION is not None
    GATED: tl.constexpr = ACTIVATION is not None and not HAS_ONE_TILE
    lanes = tl.arange(0, BLOCK_WORDS)
    first, step = tl.program_id(0), tl.num_programs(0)
    rows, is_row = tile_rows(first, num_out, BLOCK_OUT, GATED)
    tile = load_tile(weight, rows, is_row, lanes, NUM_WORDS)
    if HAS_UP:
        up_weight = weight + num_out * NUM_WORDS
        up_tile = load_tile(up_weight, rows, is_row, lanes, NUM_WORDS)
    wait_for_inputs(OVERLAP)  # after loading the weight, which no kernel writes
    total_squares = 0.0
    if CHUNKS == 1:
        inputs, squares = load_inputs(source, norms, lanes, NUM_IN, LANES)
        inputs, totals = prepare_inputs(inputs, LANES, GROUP)
        total_squares = tl.sum(squares, 0)
    else:
        tl.static_assert(norms is None or HAS_ONE_TILE, "a norm needs the whole row")
    num_turns = CHUNKS
    if not HAS_ONE_TILE:
        num_turns = tl.cdiv(tl.cdiv(num_out, BLOCK_OUT) - first, step) * CHUNKS
    sums = tl.zeros((rows.shape[0],), tl.float32)
    up_sums = sums
    for turn in tl.range(0, num_turns):
        chunk, next_chunk = turn, turn + 1
        next_rows, is_next = rows, is_row
        if not HAS_ONE_TILE:
            chunk, next_chunk = turn % CHUNKS, (turn + 1) % CHUNKS
            next_index = first + (turn + 1) // CHUNKS * step
            next_rows, is_next = tile_rows(next_index, num_out, BLOCK_OUT, GATED)
        next_words = next_chunk * BLOCK_WORDS + lanes
        next_tile = load_tile(weight, next_rows, is_next, next_words, NUM_WORDS)
        if HAS_UP:
            next_up = load_tile(up_weight, rows, is_row, next_words, NUM_WORDS)
        if CHUNKS > 1:
            word = chunk * BLOCK_WORDS + lanes
            inputs, squares = load_inputs(source, norms, word, NUM_IN, LANES)
            inputs, totals = prepare_inputs(inputs, LANES, GROUP)
            if norms is not None:
                total_squares += tl.sum(squares, 0)
        if not HAS_ONE_TILE:
            index = first + turn // CHUNKS * step
            rows, is_row = tile_rows(index, num_out, BLOCK_OUT, GATED)
        sums += add_products(
            *(tile, inputs, totals, stored, rows, is_row, chunk * BLOCK_WORDS),
            *(NUM_WORDS, LANES, GROUP),
        )
        if not HAS_ONE_TILE:  # noqa: SIM102 - this condition is known at compile time
            if chunk == CHUNKS - 1:
                sums *= row_scale(stored, rows, is_row, GROUP)
                sums *= _norm_scale(norms, total_squares, NUM_IN)
                if bias is not None:
                    sums += tl.load(bias + rows, mask=is_row, other=0.0)
                if GATED:
                    gate, up = tl.split(sums.reshape(2, BLOCK_OUT).permute(1, 0))
                    _store(y, activate(gate, ACTIVATION) * up, index, num_out, BLOCK_OUT)
                else:
                    _store(y, sums, index, num_out, BLOCK_OUT)
                sums = tl.zeros_like(sums)
        tile = next_tile
        if HAS_UP:
            up_sums += tl.sum(up_tile.to(tl.float32) * inputs[0][None, :], 1)
            up_tile = next_up
    if HAS_ONE_TILE:
        scale = _norm_scale(norms, total_squares, NUM_IN)
        if source[3] is not None:
            if CHUNKS == 1:
                tl.store(source[3] + lanes, inputs[0] * scale, mask=(lanes < NUM_IN) & (first == 0))
            elif first == 0:
                for chunk in tl.range(0, CHUNKS):
                    word = chunk * BLOCK_WORDS + lanes
                    values, _ = load_inputs(source, norms, word, NUM_IN, LANES)
                    tl.store(source[3] + word, values[0] * scale, mask=word < NUM_IN)
        sums *= scale
        up_sums *= scale
        if bias is not None:
            sums += tl.load(bias + rows, mask=is_row, other=0.0)
            if HAS_UP:
                up_sums += tl.load(bias + num_out + rows, mask=is_row, other=0.0)
        if HAS_UP:
            sums = activate(sums, ACTIVATION) * up_sums
        _store(y, sums, first, num_out, BLOCK_OUT)


@triton.jit
def _norm_scale(norms, total_squares, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    if norms is None:
        return 1.0
    else:
        return tl.rsqrt(total_squares / NUM_IN + norms[1])


@triton.jit
def row_scale(stored, rows, is_row, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of each weight row if there is one per row (GROUP 0), else 1."""
    if GROUP == 0:
        return tl.load(stored[0] + rows, mask=is_row, other=0.0)
    else:
        return 1.0


@triton.jit
def _store(y, sums, tile, num_out, BLOCK_OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    out = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(y + out, sums.to(y.dtype.element_ty), mask=out < num_out)


@triton.jit
def load_inputs(source, norms, word, NUM_IN: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inputs at each position of the given words, times the norm's weight.

    Also return the sum of the inputs' squares for each word, before the norm's weight is applied.
    """
    POSITIONS: tl.constexpr = 1 if LANES == 0 else 128 // LANES
    i = word if LANES == 0 else word // LANES * 128 + word % LANES
    value, squares = _input(source, norms, i, NUM_IN)
    values = (value,)
    for position in tl.static_range(1, POSITIONS):
        value, square = _input(source, norms, i + position * LANES, NUM_IN)
        values += (value,)  # type: ignore[assignment]
        squares += square
    return values, squares


@triton.jit
def _input(source, norms, i, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    is_in = i < NUM_IN
    values = tl.load(source[1] + i, mask=is_in, other=0.0).to(tl.float32)
    if source[2] is not None:  # residual + update, which the first CTA stores
        values += tl.load(source[2] + i, mask=is_in, other=0.0)
        rounded = values.to(source[0].dtype.element_ty)
        tl.store(source[0] + i, rounded, mask=is_in & (tl.program_id(0) + 0 * i == 0))
        values = rounded.to(tl.float32)
    squares = values * values
    if norms is not None:
        values *= tl.load(norms[0] + i, mask=is_in, other=0.0)
    return values, squares


@triton.jit
def prepare_inputs(v, LANES: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale up the inputs of int4 weights (see RAISE); also return their unscaled sums by group."""
    if LANES != 16:
        return v, ()
    else:
        PARTS: tl.constexpr = 128 // GROUP
        inputs, totals = (), ()
        for part in tl.static_range(PARTS):
            total = tl.zeros((v[0].shape[0],), tl.float32)
            for n in tl.static_range(part * 8 // PARTS, (part + 1) * 8 // PARTS):
                inputs += (v[n] * 2.0 ** (RAISE - 4 * n if n < 5 else RAISE - 4 * n + 12),)  # type: ignore[assignment]
                total += v[n]
            totals += (tl.sum(total.reshape(total.shape[0] // 16, 16), 1),)  # type: ignore[assignment]
        return inputs, totals


@triton.jit
def add_products(  # type: ignore[no-untyped-def]
    tile,
    inputs,
    totals,
    stored,
    rows,
    is_row,
    first_word,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiply a tile of weight rows by the prepared inputs, and return the sum of each row.

    The first word of the tile is `first_word`.
    """
    BLOCKS: tl.constexpr = tile.shape[1] // LANES if LANES > 0 else 0
    if LANES == 0:
        sums = tl.sum(tile.to(tl.float32) * inputs[0][None, :], 1)
    elif LANES == 32:
        w0, w1, w2, w3 = _fp8_to_floats(tile)
        products = w0 * inputs[0][None, :] + w1 * inputs[1][None, :]
        products += w2 * inputs[2][None, :]
        products += w3 * inputs[3][None, :]
        if GROUP == 0:
            sums = tl.sum(products, 1)
        else:
            group = first_word // LANES + tl.arange(0, BLOCKS)
            sums = _by_group(products, None, stored, rows, is_row, group, NUM_WORDS // 32)
    else:
        sums = tl.zeros((tile.shape[0],), tl.float32)
        for part in tl.static_range(128 // GROUP):
            products = _int4_values(tile, part * (GROUP // 16))
            products *= inputs[part * (GROUP // 16)][None, :]
            for n in tl.static_range(part * (GROUP // 16) + 1, (part + 1) * (GROUP // 16)):
                products += _int4_values(tile, n) * inputs[n][None, :]
            group = (first_word // LANES + tl.arange(0, BLOCKS)) * (128 // GROUP) + part
            sums += _by_group(
                products, totals[part], stored, rows, is_row, group, NUM_WORDS * 8 // GROUP
            )
    return sums


@triton.jit
def _by_group(products, totals, stored, rows, is_row, group, NUM_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum products by group, subtract the zero points, scale, and add up the groups."""
    LANES: tl.constexpr = products.shape[1] // group.shape[0]
    sums = tl.sum(products.reshape(products.shape[0], group.shape[0], LANES), 2)
    mask = is_row[:, None] & (group < NUM_GROUPS)[None, :]
    offsets = rows.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
    scale = tl.load(stored[0] + offsets, mask=mask, other=0.0).to(tl.float32)
    if totals is not None:
        zero = 8.0
        if stored[1] is not None:
            zero = tl.load(stored[1] + offsets, mask=mask, other=0).to(tl.float32)
        sums = sums * LOWER - zero * totals[None, :]
    return tl.sum(sums * scale, 1)


@triton.jit
def _int4_values(tile, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the int4 values at position n of words, as subnormal floats (see RAISE)."""
    values = tile & (15 << (4 * n)) if n < 5 else (tile >> 12) & (15 << (4 * n - 12))
    return values.to(tl.float32, bitcast=True)


@triton.jit
def _fp8_to_floats(tile):  # type: ignore[no-untyped-def]
    """Return the FP8 values of words in float32, one tensor per position."""
    if IS_INTERPRETED:
        return [as_floats(tile, position, 4) for position in range(4)]
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b, c, d;
            .reg .b32 e;
            mov.b32 {a, b}, $4;
            cvt.rn.f16x2.e4m3x2 e, a;
            mov.b32 {c, d}, e;
            cvt.f32.f16 $0, c;
            cvt.f32.f16 $1, d;
            cvt.rn.f16x2.e4m3x2 e, b;
            mov.b32 {c, d}, e;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }
            """,
            "=r,=r,=r,=r,r",
            [tile],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
