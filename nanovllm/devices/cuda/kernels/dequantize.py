"""Dequantization in Triton: load tiles of packed words, and convert them to MMA operands.

`ops/quantized_weight.py` describes the layout. A word packs 4 FP8 or 8 int4 values. In a block of
128 inputs with LANES words (16 for int4, 32 for FP8; dense weights: 0), the lowest bits of the
words hold the first LANES inputs, the next bits the next LANES inputs, and so on. So threads can
convert words to MMA operands without exchanging data.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from nanovllm.ops.quantized_weight import QuantizedWeight, num_blocks

CudaWeight = Tensor | QuantizedWeight

BLOCK_OUT = tl.constexpr(32)  # weight rows per CTA


def weight_arguments(weight: CudaWeight) -> tuple[Any, ...]:
    """Return a weight as kernel arguments: its tensor, and its scales and zero points, if any."""
    if isinstance(weight, Tensor):
        return weight, None
    return weight.qweight, (weight.scales, weight.zero_points)


def weight_sizes(weight: CudaWeight) -> dict[str, int]:
    """Return the compile-time sizes of a weight.

    NUM_WORDS is the number of words per row, LANES the number of words per block of 128 inputs, and
    GROUP the number of inputs that share a scale (0: the whole row). In a dense weight a word is
    one value; LANES is 0 and GROUP is -1.
    """
    num_in = weight.shape[-1]
    if isinstance(weight, Tensor):
        return {"NUM_IN": num_in, "NUM_WORDS": num_in, "LANES": 0, "GROUP": -1}
    lanes = weight.num_words // num_blocks(num_in)
    return {"NUM_IN": num_in, "NUM_WORDS": weight.num_words, "LANES": lanes, "GROUP": weight.group}


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in a 16-bit dtype, as QuantizedWeight.dequantize does.

    Used for GEMMs with many rows, for which there is no quantized kernel.
    """
    num_out, num_in = weight.shape
    y = torch.empty(num_out, num_in, device=weight.qweight.device, dtype=dtype)
    _dequantize[(num_blocks(num_in), triton.cdiv(num_out, BLOCK_OUT))](
        *(y, *weight_arguments(weight), num_out),
        **weight_sizes(weight),
        num_warps=4,
    )
    return y


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    y,
    words,
    stored,
    num_out,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Dequantize 128 inputs of BLOCK_OUT rows; the grid is (blocks of inputs, tiles of rows)."""
    POSITIONS: tl.constexpr = 128 // LANES
    PARTS: tl.constexpr = 128 // GROUP if GROUP > 0 else 1
    NUM_GROUPS: tl.constexpr = NUM_WORDS // LANES * PARTS if GROUP > 0 else 1
    block = tl.program_id(0)
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_out
    lanes = tl.arange(0, LANES)
    tile = load_tile(words, out, is_out, block * LANES + lanes, NUM_WORDS)
    for n in tl.static_range(POSITIONS):
        group = block * PARTS + n * PARTS // POSITIONS if GROUP > 0 else 0
        offset = out.to(tl.int64) * NUM_GROUPS + group
        values = as_floats(tile, n, POSITIONS)
        if stored[1] is not None:
            values -= tl.load(stored[1] + offset, mask=is_out, other=0).to(tl.float32)[:, None]
        elif POSITIONS == 8:
            values -= 8.0
        values *= tl.load(stored[0] + offset, mask=is_out, other=0.0).to(tl.float32)[:, None]
        i = block * 128 + LANES * n + lanes
        mask = is_out[:, None] & (i < NUM_IN)[None, :]
        pointers = y + out.to(tl.int64)[:, None] * NUM_IN + i[None, :]
        tl.store(pointers, values.to(y.dtype.element_ty), mask=mask)


# Words $4 and $5 give one bfloat16x2 per position. For position n, `prmt` puts byte n of each word
# into the upper byte of one 16-bit half of `a`. (The lower bytes are garbage and are masked off.)
# Shifts and masks then move exponent and mantissa to their bfloat16 positions (the sign is already
# there), and the multiplication by 2**120 corrects the exponent bias.
_FP8_POSITION = """
prmt.b32 a, $4, $5, {bytes};
and.b32 b, a, 0x7F007F00;
shr.u32 b, b, 4;
lop3.b32 b, a, 0x80008000, b, 0xEA;
fma.rn.bf16x2 ${position}, b, up, zero;
"""
_FP8_TO_BFLOAT16 = tl.constexpr(
    "{.reg .b32 a, b, up, zero; mov.b32 up, 0x7B807B80; mov.b32 zero, 0x80008000;"
    + "".join(_FP8_POSITION.format(position=n, bytes=f"0x{4 + n}0{n}0") for n in range(4))
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


def _int4_unpacking(bits: str) -> str:
    """Return PTX that unpacks words $8 and $9 to a pair of 16-bit values for each position.

    The low halves of both words hold positions 0 to 3, the high halves positions 4 to 7. `bits` is
    a pair of 16-bit offsets; the values become their low mantissa bits.
    """
    lines = ["prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    for position in range(4):
        for half, first in (("a", 0), ("b", 4)):
            lines += [f"shr.u32 {half}, {half}, 4;"] * (position > 0)
            lines += [f"lop3.b32 ${first + position}, {half}, 0x000F000F, {bits}, 0xEA;"]
    return "{.reg .b32 a, b;" + "\n".join(lines) + "}"


_INT4_TO_BFLOAT16 = tl.constexpr(_int4_unpacking("0x43004300"))
_INT4_TO_FLOAT16 = tl.constexpr(_int4_unpacking("0x64006400"))


@triton.jit
def load_tile(words, rows, is_row, word, NUM_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the given words of the given weight rows; a word of a dense weight is one value."""
    mask = is_row[:, None] & (word < NUM_WORDS)[None, :]
    pointers = words + rows.to(tl.int64)[:, None] * NUM_WORDS + word[None, :]
    return tl.load(pointers, mask=mask, other=0)


# Triton's interpreter cannot run inline assembly.
IS_INTERPRETED = tl.constexpr(not isinstance(load_tile, JITFunction))


@triton.jit
def as_operands(tile, POSITIONS: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unpack words to a 16-bit dtype, one tensor per position; int4 values include an offset.

    The offset is 128 (bfloat16) or 1024 (float16), and the four bits of an int4 value become its
    low mantissa bits.
    """
    if IS_INTERPRETED:
        values = [as_floats(tile, n, POSITIONS) for n in range(POSITIONS)]
        if POSITIONS == 8:
            values = [value + int4_offset(dtype) for value in values]
        return [value.to(dtype) for value in values]
    else:
        IS_BFLOAT16: tl.constexpr = dtype == tl.bfloat16
        FP8_PTX: tl.constexpr = _FP8_TO_BFLOAT16 if IS_BFLOAT16 else _FP8_TO_FLOAT16
        INT4_PTX: tl.constexpr = _INT4_TO_BFLOAT16 if IS_BFLOAT16 else _INT4_TO_FLOAT16
        return tl.inline_asm_elementwise(
            FP8_PTX if POSITIONS == 4 else INT4_PTX,
            "=&r," * POSITIONS + "r,r",
            [tile],
            dtype=(dtype.value,) * POSITIONS,
            is_pure=True,
            pack=2,
        )


@triton.jit
def join_positions(values, FIRST: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Concatenate the tensors of COUNT positions, starting at position FIRST.

    No data moves, because each thread holds all positions of its words.
    """
    if COUNT == 8:
        return _beside(_four_beside(values, 0), _four_beside(values, 4))
    elif COUNT == 4:
        return _four_beside(values, FIRST)
    elif COUNT == 2:
        return _beside(values[FIRST], values[FIRST + 1])
    else:
        return values[FIRST]


@triton.jit
def _four_beside(values, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    first = _beside(values[FIRST], values[FIRST + 1])
    return _beside(first, _beside(values[FIRST + 2], values[FIRST + 3]))


@triton.jit
def _beside(first, second):  # type: ignore[no-untyped-def]
    both = tl.join(first, second).permute(0, 2, 1)
    return both.reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def int4_offset(dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def as_floats(tile, position: tl.constexpr, POSITIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the quantized values at one position of the words, in float32."""
    if POSITIONS == 4:
        byte = ((tile >> (8 * position)) & 255).to(tl.uint8)
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return ((tile >> (4 * position)) & 15).to(tl.float32)
