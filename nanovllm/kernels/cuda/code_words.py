"""Words of codes in Triton: `stored_weights.py` says how they lie.

Codes of 4 bits and of FP8 differ in how many a word has, 8 or 4, and in what they are as numbers.
The codes of one place of all words of a block are a tile of their own, whose inputs lie side by
side, and those of the next place lie beside them: an operand of tensor cores is made of words
without an exchange between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

# Two words, $4 and $5, give a pair of numbers for each place. Their bytes go to the upper ones of
# two halves, then sign, exponent and fraction to where bfloat16 has them: its exponents are larger
# by 120. Below the bytes are others, which are masked.
_FP8_PLACE = """
prmt.b32 a, $4, $5, {bytes};
and.b32 b, a, 0x7F007F00;
shr.u32 b, b, 4;
lop3.b32 b, a, 0x80008000, b, 0xEA;
fma.rn.bf16x2 ${place}, b, up, zero;
"""
_FP8_TO_BFLOAT16 = tl.constexpr(
    "{.reg .b32 a, b, up, zero; mov.b32 up, 0x7B807B80; mov.b32 zero, 0x80008000;"
    + "".join(_FP8_PLACE.format(place=place, bytes=f"0x{4 + place}0{place}0") for place in range(4))
    + "}"
)
_FP8_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 a; .reg .b16 low, high;
prmt.b32 a, $4, $5, 0x5140;
mov.b32 {low, high}, a;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
prmt.b32 a, $4, $5, 0x7362;
mov.b32 {low, high}, a;
cvt.rn.f16x2.e4m3x2 $2, low;
cvt.rn.f16x2.e4m3x2 $3, high;
}""")


def _int4_places(bits: str) -> str:
    """Of two words, $8 and $9, the lower halves have a pair for four places, and the upper ones."""
    lines = ["prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    for place in range(4):
        for half, first in (("a", 0), ("b", 4)):
            lines += [f"shr.u32 {half}, {half}, 4;"] * (place > 0)
            lines += [f"lop3.b32 ${first + place}, {half}, 0x000F000F, {bits}, 0xEA;"]
    return "{.reg .b32 a, b;" + "\n".join(lines) + "}"


_INT4_TO_BFLOAT16 = tl.constexpr(_int4_places("0x43004300"))
_INT4_TO_FLOAT16 = tl.constexpr(_int4_places("0x64006400"))


@triton.jit
def load_words(words, rows, is_row, word, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load some words of rows of a weight."""
    mask = is_row[:, None] & (word < NUM_WORDS)[None, :]
    places = words + rows.to(tl.int64)[:, None] * NUM_WORDS + word[None, :]
    return tl.load(places, mask=mask, other=0)


# The interpreter runs no assembly.
IS_INTERPRETED = tl.constexpr(not isinstance(load_words, JITFunction))


@triton.jit
def as_operands(tile, PLACES: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of words by place in a type of 16 bits; those of 4 bits are raised.

    A raised code is a number of 128 (bfloat16) or 1024 (float16) more, whose last bits it is.
    """
    if PLACES == 4:
        return _fp8_operands(tile, dtype)
    else:
        return _int4_operands(tile, dtype)


@triton.jit
def join_places(codes, FIRST: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lay the codes of some places side by side: a thread that has them all moves none."""
    if COUNT == 8:
        return _beside(_four_beside(codes, 0), _four_beside(codes, 4))
    elif COUNT == 4:
        return _four_beside(codes, FIRST)
    elif COUNT == 2:
        return _beside(codes[FIRST], codes[FIRST + 1])
    else:
        return codes[FIRST]


@triton.jit
def _four_beside(codes, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    first = _beside(codes[FIRST], codes[FIRST + 1])
    return _beside(first, _beside(codes[FIRST + 2], codes[FIRST + 3]))


@triton.jit
def _beside(first, second):  # type: ignore[no-untyped-def]
    both = tl.join(first, second).permute(0, 2, 1)
    return both.reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def raised_by(dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def as_floats(tile, place: tl.constexpr, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of one place of words in float32."""
    if PLACES == 4:
        code = ((tile >> (8 * place)) & 255).to(tl.uint8)
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return ((tile >> (4 * place)) & 15).to(tl.float32)


@triton.jit
def _fp8_operands(tile, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_INTERPRETED:
        return (
            as_floats(tile, 0, 4).to(dtype),
            as_floats(tile, 1, 4).to(dtype),
            as_floats(tile, 2, 4).to(dtype),
            as_floats(tile, 3, 4).to(dtype),
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _FP8_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r",
            [tile],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8_TO_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r",
            [tile],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _int4_operands(tile, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_INTERPRETED:
        return (
            _raised(tile, 0, dtype),
            _raised(tile, 1, dtype),
            _raised(tile, 2, dtype),
            _raised(tile, 3, dtype),
            _raised(tile, 4, dtype),
            _raised(tile, 5, dtype),
            _raised(tile, 6, dtype),
            _raised(tile, 7, dtype),
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT4_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [tile],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4_TO_FLOAT16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [tile],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _raised(tile, place: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return (((tile >> (4 * place)) & 15) | BITS).to(tl.int16).to(dtype, bitcast=True)
