"""Projections of one row by weights that stay quantised: reading them, once, takes the time.

As many programs as fill the device share the outputs, some at a time: each prepares the row once,
norm included, and loads the next tile of the weight while it works on one. Codes are widened in
registers; scales are applied to the sums of groups. The gate is fused as in linear_one_row.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.linear_one_row import add_update
from nanovllm.kernels.cuda.linear_tiles import num_processors, tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.ops import Activation, Hidden, NormWeights
from nanovllm.kernels.stored_weights import Fp8Weight, Int4Weight

# Four bits anywhere in the lowest 20 of a word are a float32 that need not be converted: their code
# times 2**(4 * n - 149). What they are multiplied by is made as much larger.
RAISE = tl.constexpr(100)  # inputs by 2**100: up to 2**27 they stay finite
LOWER = tl.constexpr(2.0**49)  # by which sums come back


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    block_out: int  # rows of the weight in a tile
    block_in: int  # inputs in a tile
    num_warps: int
    programs: int  # for each processor


def codes_one_row(
    hidden: Hidden,
    norm: NormWeights | None,
    weight: Fp8Weight | Int4Weight,
    bias: Tensor | None,
    activation: Activation | None,
    config: OneRowConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Project residual + update [1, in], normed if asked for; return also that sum."""
    residual, update = hidden.residual, hidden.update
    num_rows, num_in = weight.shape
    assert residual.shape == (1, num_in), residual.shape
    assert update is None or update.shape == residual.shape, "partial sums of one row"
    num_out = num_rows if activation is None else num_rows // 2
    y = torch.empty(1, num_out, device=residual.device, dtype=residual.dtype)
    total = residual if update is None else torch.empty_like(residual)
    assert norm is not None or update is None, "an update is added by the norm that follows"
    config = config or one_row_config(weight, norm is not None)
    block_out = config.block_out if activation is None else config.block_out // 2
    num_tiles = triton.cdiv(num_out, block_out)
    rows = (y, total, residual, update)
    norms = None if norm is None else (norm.weight, norm.eps)
    shared = {
        "BLOCK_OUT": block_out,
        "ACTIVATION": activation,
        "num_warps": config.num_warps,
        **launch_options(residual, 1),
    }
    grid = (min(num_tiles, config.programs * num_processors(residual.device)),)
    if isinstance(weight, Fp8Weight):
        stored = (weight.codes.view(torch.int32), weight.scales)
        sizes = {"NUM_IN": num_in, "NUM_SCALES": weight.scales.shape[1]}
        shared |= {"BLOCK_WORDS": config.block_in // 4, "COMPILED": residual.is_cuda}
        _fp8[grid](*rows, *stored, bias, norms, num_out, **sizes, **shared)
        return y, total
    words = weight.words.shape[1]
    codes = (weight.words, weight.scales, weight.zeros)
    sizes = {"NUM_IN": num_in, "NUM_WORDS": words, "GROUP": weight.group}
    shared["BLOCK_WORDS"] = config.block_in // 8
    _int4[grid](*rows, *codes, bias, norms, num_out, **sizes, **shared)
    return y, total


def one_row_config(weight: Fp8Weight | Int4Weight, has_norm: bool) -> OneRowConfig:
    """A norm needs the whole row at once; the rest is by Qwen3-8B's shapes on an H200."""
    block_in = max(128, triton.next_power_of_2(weight.shape[1]))
    block_in = block_in if has_norm else min(block_in, 4096)
    num_warps = max(4, block_in // 1024)
    if isinstance(weight, Int4Weight):
        is_small = has_norm and weight.shape[0] <= 8192
        return OneRowConfig(16 if is_small else 8, block_in, num_warps, 4)
    if has_norm:
        return OneRowConfig(4, block_in, num_warps, 4)
    is_whole = block_in >= weight.shape[1]
    return OneRowConfig(4, block_in, 8, 4) if is_whole else OneRowConfig(8, 2048, 2, 8)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    y, sums, bias, tile, num_out, BLOCK_OUT: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Add the bias, apply the gate and store what a tile gives."""
    rows, is_row = tile_rows(tile, num_out, BLOCK_OUT, ACTIVATION is not None)
    if bias is not None:
        sums += tl.load(bias + rows, mask=is_row, other=0.0)
    if ACTIVATION is not None:
        gate, up = tl.split(sums.reshape(2, BLOCK_OUT).permute(1, 0))
        sums = activate(gate, ACTIVATION) * up
    out = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(y + out, sums.to(y.dtype.element_ty), mask=out < num_out)


@triton.jit
def _input(total_out, residual, update, norms, i, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return some inputs, times the norm's weight, and their squares before that."""
    is_in = i < NUM_IN
    values = add_update(total_out, residual, update, i, is_in)
    squares = values * values
    if norms is not None:
        values *= tl.load(norms[0] + i, mask=is_in, other=0.0)
    return values, squares


@triton.jit
def _fp8(  # type: ignore[no-untyped-def]
    y,
    total_out,
    residual,
    update,
    words,
    scales,
    bias,
    norms,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A word has the codes of four inputs."""
    NUM_WORDS: tl.constexpr = NUM_IN // 4
    CHUNKS: tl.constexpr = (NUM_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    GATED: tl.constexpr = ACTIVATION is not None
    lanes = tl.arange(0, BLOCK_WORDS)
    first, step = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(num_out, BLOCK_OUT)
    rows, is_row = tile_rows(first, num_out, BLOCK_OUT, GATED)
    tile = _load_words(words, rows, is_row, lanes, NUM_WORDS)
    wait_for_inputs(OVERLAP)  # the weight does not depend on the kernels before this one
    inputs = tl.arange(0, 4 * BLOCK_WORDS)
    values, squares = _input(total_out, residual, update, norms, inputs, NUM_IN)
    x0, x1, x2, x3 = _by_byte(values)
    scale = 1.0
    if norms is not None:
        tl.static_assert(CHUNKS == 1, "a norm needs the whole row")
        scale = tl.rsqrt(tl.sum(squares, 0) / NUM_IN + norms[1])
    sums = tl.zeros((rows.shape[0],), tl.float32)
    for turn in tl.range(0, tl.cdiv(num_tiles - first, step) * CHUNKS):
        place, chunk = first + turn // CHUNKS * step, turn % CHUNKS
        next_rows, is_next = tile_rows(
            first + (turn + 1) // CHUNKS * step, num_out, BLOCK_OUT, GATED
        )
        next_words = (turn + 1) % CHUNKS * BLOCK_WORDS + lanes
        next_tile = _load_words(words, next_rows, is_next, next_words, NUM_WORDS)
        if CHUNKS > 1:
            i = chunk * (4 * BLOCK_WORDS) + inputs
            values, _ = _input(total_out, residual, None, None, i, NUM_IN)
            x0, x1, x2, x3 = _by_byte(values)
        rows, is_row = tile_rows(place, num_out, BLOCK_OUT, GATED)
        w0, w1, w2, w3 = _widen(tile, COMPILED)
        products = w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]
        begin = chunk * (BLOCK_WORDS // 32)
        sums += _by_block(products, scales, rows, is_row, begin, NUM_SCALES)
        if chunk == CHUNKS - 1:
            if NUM_SCALES == 1:
                sums *= tl.load(scales + rows, mask=is_row, other=0.0)
            _finish(y, sums * scale, bias, place, num_out, BLOCK_OUT, ACTIVATION)
            sums = tl.zeros_like(sums)
        tile = next_tile


@triton.jit
def _by_byte(values):  # type: ignore[no-untyped-def]
    """Split inputs by the byte of a word that their codes are in."""
    even, odd = tl.split(values.reshape(values.shape[0] // 4, 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _widen(tile, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what the bytes of words are as FP8."""
    if COMPILED:
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
    else:
        return _byte(tile, 0), _byte(tile, 8), _byte(tile, 16), _byte(tile, 24)


@triton.jit
def _byte(tile, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    code = ((tile >> SHIFT) & 255).to(tl.uint8)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _by_block(products, scales, rows, is_row, begin, NUM_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up what words give; where blocks of 128 inputs have scales, apply these."""
    if NUM_SCALES > 1:
        BLOCKS: tl.constexpr = products.shape[1] // 32
        by_block = tl.sum(products.reshape(products.shape[0], BLOCKS, 32), 2)
        block = begin + tl.arange(0, BLOCKS)
        mask = is_row[:, None] & (block < NUM_SCALES)[None, :]
        pointers = scales + rows.to(tl.int64)[:, None] * NUM_SCALES + block[None, :]
        return tl.sum(by_block * tl.load(pointers, mask=mask, other=0.0), 1)
    else:
        return tl.sum(products, 1)


@triton.jit
def _int4(  # type: ignore[no-untyped-def]
    y,
    total_out,
    residual,
    update,
    words,
    scales,
    zeros,
    bias,
    norms,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    CHUNKS: tl.constexpr = (NUM_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    GATED: tl.constexpr = ACTIVATION is not None
    lanes = tl.arange(0, BLOCK_WORDS)
    first, step = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(num_out, BLOCK_OUT)
    rows, is_row = tile_rows(first, num_out, BLOCK_OUT, GATED)
    tile = _load_words(words, rows, is_row, lanes, NUM_WORDS)
    wait_for_inputs(OVERLAP)
    values, totals, squares = _inputs(total_out, residual, update, norms, lanes, NUM_IN, GROUP)
    scale = 1.0
    if norms is not None:
        tl.static_assert(CHUNKS == 1, "a norm needs the whole row")
        scale = tl.rsqrt(squares / NUM_IN + norms[1])
    sums = tl.zeros((rows.shape[0],), tl.float32)
    for turn in tl.range(0, tl.cdiv(num_tiles - first, step) * CHUNKS):
        place, chunk = first + turn // CHUNKS * step, turn % CHUNKS
        next_rows, is_next = tile_rows(
            first + (turn + 1) // CHUNKS * step, num_out, BLOCK_OUT, GATED
        )
        next_words = (turn + 1) % CHUNKS * BLOCK_WORDS + lanes
        next_tile = _load_words(words, next_rows, is_next, next_words, NUM_WORDS)
        word = chunk * BLOCK_WORDS + lanes
        if CHUNKS > 1:
            values, totals, _ = _inputs(total_out, residual, None, None, word, NUM_IN, GROUP)
        rows, is_row = tile_rows(place, num_out, BLOCK_OUT, GATED)
        for part in tl.static_range(128 // GROUP):
            products = _codes(tile, part * (GROUP // 16)) * values[part * (GROUP // 16)][None, :]
            for n in tl.static_range(part * (GROUP // 16) + 1, (part + 1) * (GROUP // 16)):
                products += _codes(tile, n) * values[n][None, :]
            block = chunk * (BLOCK_WORDS // 16) + tl.arange(0, BLOCK_WORDS // 16)
            group = block * (128 // GROUP) + part
            stored = (scales, zeros)
            sums += _by_group(
                products, totals[part], stored, rows, is_row, group, NUM_WORDS * 8 // GROUP
            )
        if chunk == CHUNKS - 1:
            _finish(y, sums * scale, bias, place, num_out, BLOCK_OUT, ACTIVATION)
            sums = tl.zeros_like(sums)
        tile = next_tile


@triton.jit
def _load_words(words, rows, is_row, word, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = is_row[:, None] & (word < NUM_WORDS)[None, :]
    return tl.load(
        words + rows.to(tl.int64)[:, None] * NUM_WORDS + word[None, :], mask=mask, other=0
    )


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    total_out, residual, update, norms, word, NUM_IN: tl.constexpr, GROUP: tl.constexpr
):
    """The inputs of words by place, raised; their sums by group; the sum of all squares."""
    i = word // 16 * 128 + word % 16
    v0, s0 = _input(total_out, residual, update, norms, i, NUM_IN)
    v1, s1 = _input(total_out, residual, update, norms, i + 16, NUM_IN)
    v2, s2 = _input(total_out, residual, update, norms, i + 32, NUM_IN)
    v3, s3 = _input(total_out, residual, update, norms, i + 48, NUM_IN)
    v4, s4 = _input(total_out, residual, update, norms, i + 64, NUM_IN)
    v5, s5 = _input(total_out, residual, update, norms, i + 80, NUM_IN)
    v6, s6 = _input(total_out, residual, update, norms, i + 96, NUM_IN)
    v7, s7 = _input(total_out, residual, update, norms, i + 112, NUM_IN)
    squares = tl.sum(((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)), 0)
    q0, q1, q2, q3 = _add_up(v0 + v1), _add_up(v2 + v3), _add_up(v4 + v5), _add_up(v6 + v7)
    if GROUP == 128:
        q0 = (q0 + q1) + (q2 + q3)
    elif GROUP == 64:
        q0, q1 = q0 + q1, q2 + q3
    v0, v1, v2, v3 = v0 * _factor(0), v1 * _factor(1), v2 * _factor(2), v3 * _factor(3)
    v4, v5, v6, v7 = v4 * _factor(4), v5 * _factor(5), v6 * _factor(6), v7 * _factor(7)
    return (v0, v1, v2, v3, v4, v5, v6, v7), (q0, q1, q2, q3), squares


@triton.jit
def _add_up(values):  # type: ignore[no-untyped-def]
    """Add inputs up by block."""
    return tl.sum(values.reshape(values.shape[0] // 16, 16), 1)


@triton.jit
def _factor(n: tl.constexpr):  # type: ignore[no-untyped-def]
    """By what inputs are multiplied for their codes."""
    EXPONENT: tl.constexpr = RAISE - 4 * n if n < 5 else RAISE - 4 * n + 12
    return 2.0**EXPONENT


@triton.jit
def _codes(tile, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes in bits 4 * n of words, as tiny floats."""
    codes = tile & (15 << (4 * n)) if n < 5 else (tile >> 12) & (15 << (4 * n - 12))
    return codes.to(tl.float32, bitcast=True)


@triton.jit
def _by_group(products, totals, stored, rows, is_row, group, NUM_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum products with codes up by group, take off those with zero points, and scale."""
    by_group = tl.sum(products.reshape(products.shape[0], products.shape[1] // 16, 16), 2)
    mask = is_row[:, None] & (group < NUM_GROUPS)[None, :]
    place = rows.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
    zero = 8.0
    if stored[1] is not None:
        zero = tl.load(stored[1] + place, mask=mask, other=0).to(tl.float32)
    scale = tl.load(stored[0] + place, mask=mask, other=0.0).to(tl.float32)
    return tl.sum((by_group * LOWER - zero * totals[None, :]) * scale, 1)
