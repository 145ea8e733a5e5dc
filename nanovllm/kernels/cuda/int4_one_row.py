"""One row by weights of 4 bits in groups of 128, on tensor cores: unpacking is most of the work.

A thread has four words of two outputs, so four threads have a group. Each hands its own codes and
inputs to a product of 16 x 16 by 16 x 8 numbers, whose rows are groups and whose columns are those
groups' inputs: what lies on the diagonal are the sums of groups, and the rest is not used.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.linear_one_row import add_update
from nanovllm.kernels.cuda.pdl import wait_for_inputs


def _assembly() -> str:
    """Two outputs of four words in a thread: $8 and $12 are their first words, $16 its inputs'."""
    lines = [
        ".reg .b32 a<4>, c, s, lane, row, column;",
        ".reg .f32 d<4>, z;",
        ".reg .pred even, odd;",
        "mov.b32 c, 0x43004300;",  # 128 twice: a code below it is added by an or
        "mov.f32 z, 0f00000000;",
    ]
    for word, first in itertools.product(range(4), (0, 2)):
        for i, (pair, source) in enumerate(itertools.product((first, first + 1), (8, 12))):
            lines.append(f"shr.u32 s, ${source + word}, {4 * pair};")
            lines.append(f"lop3.b32 a{i}, s, 0x000F000F, c, 0xEA;")  # (s & mask) | c
        inputs = f"{{${16 + 4 * first + word}, ${20 + 4 * first + word}}}"
        before = "{z, z, z, z}" if (word, first) == (0, 0) else "{d0, d1, d2, d3}"
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, {inputs}, {before};"
        )
    lines += [
        "mov.u32 lane, %laneid;",
        "shr.u32 row, lane, 2;",
        "and.b32 column, lane, 3;",
        "shl.b32 column, column, 1;",
        "setp.eq.u32 even, row, column;",
        "add.u32 column, column, 1;",
        "setp.eq.u32 odd, row, column;",
    ]
    for output, i in ((0, 0), (4, 2)):
        lines.append(f"selp.f32 d{i + 1}, d{i + 1}, z, odd;")
        lines.append(f"selp.f32 ${output}, d{i}, d{i + 1}, even;")
        lines += [f"mov.b32 ${output + zero}, 0;" for zero in (1, 2, 3)]
    return "{\n" + "\n".join(lines) + "\n}"


ASSEMBLY = tl.constexpr(_assembly())
CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 24))


@triton.jit
def int4_one_row(  # type: ignore[no-untyped-def]
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
    BLOCK_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile has two halves of BLOCK_OUT rows: of gate and of up, or outputs and those after."""
    CHUNKS: tl.constexpr = (NUM_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    GATED: tl.constexpr = ACTIVATION is not None
    PER_TILE: tl.constexpr = BLOCK_OUT if GATED else 2 * BLOCK_OUT
    apart = num_out if GATED else BLOCK_OUT
    lanes = tl.arange(0, BLOCK_WORDS)
    first, step = tl.program_id(0), tl.num_programs(0)
    out = first * PER_TILE + tl.arange(0, BLOCK_OUT)
    tile = _load(words, out, lanes, num_out, NUM_WORDS)
    other = _load(words, out + apart, lanes, num_out + GATED * num_out, NUM_WORDS)
    wait_for_inputs(OVERLAP)  # the weight does not depend on the kernels before this one
    x, totals, squares = _pairs(total_out, residual, update, norms, lanes, NUM_IN)
    factor = 1.0
    if norms is not None:
        tl.static_assert(CHUNKS == 1, "a norm needs the whole row")
        factor = tl.rsqrt(squares / NUM_IN + norms[1])
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    others = tl.zeros((BLOCK_OUT,), tl.float32)
    for turn in tl.range(0, tl.cdiv(tl.cdiv(num_out, PER_TILE) - first, step) * CHUNKS):
        chunk = turn % CHUNKS
        next_word = (turn + 1) % CHUNKS * BLOCK_WORDS + lanes
        next_out = (first + (turn + 1) // CHUNKS * step) * PER_TILE + tl.arange(0, BLOCK_OUT)
        next_tile = _load(words, next_out, next_word, num_out, NUM_WORDS)
        next_other = _load(words, next_out + apart, next_word, num_out + GATED * num_out, NUM_WORDS)
        if CHUNKS > 1:
            x, totals, _ = _pairs(
                total_out, residual, None, None, chunk * BLOCK_WORDS + lanes, NUM_IN
            )
        out = (first + turn // CHUNKS * step) * PER_TILE + tl.arange(0, BLOCK_OUT)
        d, e = _multiply(tile, other, x)
        stored = (scales, zeros)
        sums += _scale(d, totals, stored, out, chunk, num_out, NUM_WORDS)
        others += _scale(
            e, totals, stored, out + apart, chunk, num_out + GATED * num_out, NUM_WORDS
        )
        if chunk == CHUNKS - 1:
            _finish(y, sums * factor, others * factor, bias, out, num_out, ACTIVATION)
            sums = tl.zeros_like(sums)
            others = tl.zeros_like(others)
        tile = next_tile
        other = next_other


@triton.jit
def _load(words, rows, word, num_rows, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = (rows < num_rows)[:, None] & (word < NUM_WORDS)[None, :]
    return tl.load(
        words + rows.to(tl.int64)[:, None] * NUM_WORDS + word[None, :], mask=mask, other=0
    )


@triton.jit
def _pairs(total_out, residual, update, norms, word, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inputs of words in pairs of bfloat16, their sums by four words, the sum of squares."""
    i = word // 16 * 128 + word % 16
    x0, t0, s0 = _pair(total_out, residual, update, norms, i, NUM_IN)
    x1, t1, s1 = _pair(total_out, residual, update, norms, i + 16, NUM_IN)
    x2, t2, s2 = _pair(total_out, residual, update, norms, i + 32, NUM_IN)
    x3, t3, s3 = _pair(total_out, residual, update, norms, i + 48, NUM_IN)
    totals = tl.sum(((t0 + t1) + (t2 + t3)).reshape(word.shape[0] // 4, 4), 1)
    return (x0, x1, x2, x3), totals, tl.sum((s0 + s1) + (s2 + s3), 0)


@triton.jit
def _pair(total_out, residual, update, norms, i, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs i and i + 64, times the norm's weight: packed, their sum, and that of squares."""
    a = add_update(total_out, residual, update, i, i < NUM_IN)
    b = add_update(total_out, residual, update, i + 64, i + 64 < NUM_IN)
    squares = a * a + b * b
    if norms is not None:
        a *= tl.load(norms[0] + i, mask=i < NUM_IN, other=0.0)
        b *= tl.load(norms[0] + i + 64, mask=i + 64 < NUM_IN, other=0.0)
    pair = tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )
    low = (pair << 16).to(tl.float32, bitcast=True)
    high = ((pair >> 16) << 16).to(tl.float32, bitcast=True)
    return pair, low + high, squares


@triton.jit
def _multiply(tile, other, x):  # type: ignore[no-untyped-def]
    """Sums of products with 128 + code of groups, in one of the four threads that have each.

    The first of its four words has the sum, everything else is zero.
    """
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [tile, other, x[0][None, :], x[1][None, :], x[2][None, :], x[3][None, :]],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _scale(sums, totals, stored, rows, chunk, num_rows, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take off what zero points and the 128 give, apply the scales of groups, and add up."""
    NUM_GROUPS: tl.constexpr = NUM_WORDS // 16
    FOURTHS: tl.constexpr = sums.shape[1] // 4  # four words of a thread
    group = (chunk * FOURTHS + tl.arange(0, FOURTHS)) // 4
    mask = (rows < num_rows)[:, None] & (group < NUM_GROUPS)[None, :]
    place = rows.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
    zero = 8.0
    if stored[1] is not None:
        zero = tl.load(stored[1] + place, mask=mask, other=0).to(tl.float32)
    scale = tl.load(stored[0] + place, mask=mask, other=0.0).to(tl.float32)
    by_thread = tl.reduce(sums.reshape(sums.shape[0], FOURTHS, 4), 2, _first)
    return tl.sum((by_thread - (128.0 + zero) * totals[None, :]) * scale, 1)


@triton.jit
def _first(a, b):  # type: ignore[no-untyped-def]
    return a


@triton.jit
def _finish(y, sums, others, bias, out, num_out, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the bias, apply the gate and store what both halves of a tile give."""
    is_out = out < num_out
    if ACTIVATION is not None:
        if bias is not None:
            sums += tl.load(bias + out, mask=is_out, other=0.0)
            others += tl.load(bias + num_out + out, mask=is_out, other=0.0)
        sums = activate(sums, ACTIVATION) * others
        tl.store(y + out, sums.to(y.dtype.element_ty), mask=is_out)
    else:
        after = out + out.shape[0]
        if bias is not None:
            sums += tl.load(bias + out, mask=is_out, other=0.0)
            others += tl.load(bias + after, mask=after < num_out, other=0.0)
        tl.store(y + out, sums.to(y.dtype.element_ty), mask=is_out)
        tl.store(y + after, others.to(y.dtype.element_ty), mask=after < num_out)
