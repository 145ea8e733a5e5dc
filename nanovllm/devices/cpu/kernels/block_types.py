"""The quant block types of GGUF: how 16 rows are interleaved, and how kernels read them.

A quant block consists of units of 2 or 4 bytes: scales and packed integers. A panel interleaves the
quant blocks of 16 rows: unit 0 of all 16 rows, then unit 1 of all 16 rows, and so on. So a vector
has one lane per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import numpy.typing as npt

from nanovllm.devices.cpu.kernels.intrinsics import constant
from nanovllm.devices.cpu.kernels.simd import broadcast_lanes
from nanovllm.ops.quantized_weight import PANEL_ROWS

FRACTION_SHIFT, ONE_BITS = 19, 0x3F800000  # float32: shift of the top 4 mantissa bits; bits of 1.0
I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS, FLOATS = ir.VectorType(I32, PANEL_ROWS), ir.VectorType(FLOAT, PANEL_ROWS)


@dataclass(frozen=True, slots=True)
class Group:
    """Columns that share a scale: each value is scale * (integer - offset) + low."""

    scale: Any
    low: Any | None  # the minimum value, in types that store one
    offset: int
    integer: Callable[[int], Any]  # emits code for the integers of a column
    # For 4-bit integers only: emits code for 1 + integer / 16, by setting mantissa bits of 1.0.
    fraction: Callable[[int], Any] | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    size: int  # columns per quant block
    units: tuple[int, ...]  # bytes of each unit, in stored order
    num_steps: int  # number of equal steps in which a quant block is read
    group_size: int  # columns per group
    groups: Callable[[Block, Any], list[Group]]  # emits code that reads the groups of a step

    @property
    def num_bytes(self) -> int:
        return sum(self.units)


def pack_panels(
    rows: npt.NDArray[np.uint8], kind: BlockType, panels: npt.NDArray[np.uint8]
) -> None:
    """Lay out rows of quant blocks as panels; the last panel is padded with zero rows."""
    if len(rows) % PANEL_ROWS:
        panels[-1] = 0
    for panel, first in zip(panels, range(0, len(rows), PANEL_ROWS), strict=True):
        part = rows[first : first + PANEL_ROWS]
        blocks = part.reshape(len(part), -1, kind.num_bytes)
        target = panel.reshape(blocks.shape[1], -1)
        for start, count, unit in _runs(kind):
            size = count * unit
            source = blocks[:, :, start : start + size].reshape(*blocks.shape[:2], count, unit)
            lanes = target[:, start * PANEL_ROWS : (start + size) * PANEL_ROWS]
            lanes = lanes.reshape(-1, count, PANEL_ROWS, unit)  # a view of `panel`
            lanes[:, :, : len(part)] = source.transpose(1, 2, 0, 3)


def _runs(kind: BlockType) -> list[tuple[int, int, int]]:
    """Return runs of units of equal size, each as (first byte, count, unit size)."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for unit in kind.units:
        if runs and runs[-1][2] == unit:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, unit)
        else:
            runs.append((start, 1, unit))
        start += unit
    return runs


class Block:
    """Emits code that reads a quant block of every row of a panel."""

    def __init__(self, builder: Any, address: Any, units: tuple[int, ...]) -> None:
        self.builder, self.address, self.units = builder, address, units

    def half(self, unit: int) -> Any:
        """Emit a load of a float16 unit of every row, upcast to float32."""
        bits = self._load(unit, ir.VectorType(ir.IntType(16), PANEL_ROWS))
        if _has_halves():
            halves = self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), PANEL_ROWS))
            return self.builder.fpext(halves, FLOATS)
        return _upcast_halves(self.builder, bits)

    def word(self, unit: int, further: Any = None) -> Any:
        """Emit a load of a four-byte unit of every row, `further` units after `unit`."""
        return self._load(unit, WORDS, further)

    def bits(self, word: Any, shift: int, mask: int) -> Any:
        """Emit (word >> shift) & mask; a negative shift is to the left."""
        if shift > 0:
            word = self.builder.lshr(word, constant(WORDS, shift))
        elif shift < 0:
            word = self.builder.shl(word, constant(WORDS, -shift))
        return self.builder.and_(word, constant(WORDS, mask))

    def fraction(self, word: Any, shift: int) -> Any:
        """Emit a float32 in [1, 2) whose top four mantissa bits are (word >> shift) & 15."""
        bits = self.bits(word, shift - FRACTION_SHIFT, 15 << FRACTION_SHIFT)
        return self.builder.bitcast(self.builder.or_(bits, constant(WORDS, ONE_BITS)), FLOATS)

    def signed_byte(self, word: Any, index: int) -> Any:
        word = self.builder.shl(word, constant(WORDS, 24 - 8 * index)) if index < 3 else word
        return self.builder.ashr(word, constant(WORDS, 24))

    def byte(self, word: Any, index: int) -> Any:
        top = self.builder.lshr(word, constant(WORDS, 24))
        return top if index == 3 else self.bits(word, 8 * index, 255)

    def shifted(self, word: Any, by: Any) -> Any:
        """Emit a right shift by an amount that is known only at run time."""
        return self.builder.lshr(word, broadcast(self.builder, self.builder.trunc(by, I32)))

    def to_float(self, integers: Any) -> Any:
        return self.builder.sitofp(integers, FLOATS)

    def _load(self, unit: int, vector: Any, further: Any = None) -> Any:
        offset = I64(sum(self.units[:unit]) * PANEL_ROWS)
        if further is not None:
            step = self.builder.mul(further, I64(self.units[unit] * PANEL_ROWS))
            offset = self.builder.add(offset, step)
        pointer = self.builder.gep(self.address, [offset])
        return self.builder.load(self.builder.bitcast(pointer, vector.as_pointer()), align=2)


def broadcast(builder: Any, value: Any) -> Any:
    """Emit a vector with this value in the lane of every row."""
    return broadcast_lanes(builder, value, PANEL_ROWS)


def _has_halves() -> bool:
    """Whether the CPU has instructions to convert float16; every 64-bit ARM CPU has them."""
    features = llvm.get_host_cpu_features()
    return features.get("f16c", False) or "x86" not in llvm.get_default_triple()


def _upcast_halves(builder: Any, bits: Any) -> Any:
    """Upcast float16 bits to float32 by shifts and a multiplication; infinity becomes 65536."""
    words = builder.zext(bits, WORDS)
    rest = builder.shl(builder.and_(words, constant(WORDS, 0x7FFF)), constant(WORDS, 13))
    size = builder.fmul(builder.bitcast(rest, FLOATS), constant(FLOATS, 2.0**112))
    sign = builder.shl(builder.and_(words, constant(WORDS, 0x8000)), constant(WORDS, 16))
    return builder.bitcast(builder.or_(builder.bitcast(size, WORDS), sign), FLOATS)


def _q8_0(block: Block, step: Any) -> list[Group]:
    words = [block.word(1 + i) for i in range(8)]
    return [Group(block.half(0), None, 0, lambda i: block.signed_byte(words[i // 4], i % 4))]


def _of_nibbles(has_low: bool, has_fifth: bool) -> Callable[[Block, Any], list[Group]]:
    """Return `BlockType.groups` of Q4_0, Q4_1, Q5_0 or Q5_1.

    A quant block holds a scale, a minimum (Q*_1 only), the fifth bits (Q5_* only) and the nibbles.
    """

    def groups(block: Block, step: Any) -> list[Group]:
        scale, low = block.half(0), block.half(1) if has_low else None
        first = 1 + has_low + has_fifth
        fifths = block.word(first - 1) if has_fifth else None
        words = [block.word(first + i) for i in range(4)]

        def nibble(column: int) -> tuple[Any, int]:
            half, i = divmod(column, 16)
            return words[i // 4], 8 * (i % 4) + 4 * half

        def integer(column: int) -> Any:
            four = block.bits(*nibble(column), 15)
            if fifths is None:
                return four
            return block.builder.or_(four, block.bits(fifths, column - 4, 16))

        def fraction(column: int) -> Any:
            return block.fraction(*nibble(column))

        offset = 0 if has_low else 16 if has_fifth else 8
        return [Group(scale, low, offset, integer, None if has_fifth else fraction)]

    return groups


def _of_superblocks(has_fifth: bool) -> Callable[[Block, Any], list[Group]]:
    """Return `BlockType.groups` of Q4_K or Q5_K.

    A quant block has eight groups of 32, each with a 6-bit scale and a 6-bit minimum. Groups 2 * i
    and 2 * i + 1 share bytes: each uses one nibble of every byte. The fifth bits of all eight
    groups share bytes, too.
    """

    def groups(block: Block, step: Any) -> list[Group]:
        builder, first = block.builder, 13 if has_fifth else 5
        pair = builder.lshr(step, I64(1))
        integers = []
        for i in range(8):
            nibbles = block.word(first + i, builder.mul(pair, I64(8)))
            nibbles = block.shifted(nibbles, builder.mul(builder.and_(step, I64(1)), I64(4)))
            integers.append(block.bits(nibbles, 0, 0x0F0F0F0F))
            if has_fifth:
                fifths = block.bits(block.shifted(block.word(5 + i), step), 0, 0x01010101)
                integers[i] = builder.or_(integers[i], builder.shl(fifths, constant(WORDS, 4)))
        scale, low = _six_bits(block, step)
        scale = builder.fmul(block.half(0), block.to_float(scale))
        low = builder.fneg(builder.fmul(block.half(1), block.to_float(low)))
        return [Group(scale, low, 0, lambda i: block.byte(integers[i // 4], i % 4))]

    return groups


def _six_bits(block: Block, step: Any) -> tuple[Any, Any]:
    """Emit code for the 6-bit scale and minimum of a step's group.

    Groups 0 to 3 use the low 6 bits of a byte. The values of groups 4 to 7 consist of the upper
    two bits of these bytes and a nibble of another byte.
    """
    builder = block.builder
    by = builder.mul(builder.and_(step, I64(3)), I64(8))
    scales, lows, rests = (block.shifted(block.word(2 + i), by) for i in range(3))
    is_whole = builder.icmp_signed("<", step, I64(4))

    def choose(byte: Any, rest: Any) -> Any:
        joined = builder.or_(block.bits(byte, 2, 48), rest)
        return builder.select(is_whole, block.bits(byte, 0, 63), joined)

    return choose(scales, block.bits(rests, 0, 15)), choose(lows, block.bits(rests, 4, 15))


def _q6_k(block: Block, step: Any) -> list[Group]:
    """Return the two groups that a step of Q6_K reads.

    A quant block has 16 groups of 16, each with an 8-bit scale. It consists of two halves of four
    quarters each, and a step reads a quarter. The nibbles of quarters 0 and 2 share bytes, as do
    those of quarters 1 and 3. The upper bits of all four quarters share bytes.
    """
    builder = block.builder
    half, quarter = builder.lshr(step, I64(2)), builder.and_(step, I64(3))
    first = builder.add(builder.mul(half, I64(16)), builder.mul(builder.and_(step, I64(1)), I64(8)))
    nibble_shift = builder.mul(builder.lshr(quarter, I64(1)), I64(4))
    integers = []
    for i in range(8):
        nibbles = block.bits(block.shifted(block.word(i, first), nibble_shift), 0, 0x0F0F0F0F)
        upper = block.word(32 + i, builder.mul(half, I64(8)))
        upper = block.bits(block.shifted(upper, builder.mul(quarter, I64(2))), 0, 0x03030303)
        integers.append(builder.or_(nibbles, builder.shl(upper, constant(WORDS, 4))))

    def integer(first_word: int, column: int) -> Any:
        return block.byte(integers[first_word + column // 4], column % 4)

    scales = block.word(48, builder.lshr(step, I64(1)))
    scales = block.shifted(scales, builder.mul(builder.and_(step, I64(1)), I64(16)))
    groups = []
    for i in range(2):
        scale = builder.fmul(block.half(52), block.to_float(block.signed_byte(scales, i)))
        groups.append(Group(scale, None, 32, partial(integer, 4 * i)))
    return groups


TYPES = {
    "Q8_0": BlockType(32, (2, *[4] * 8), 1, 32, _q8_0),
    "Q4_0": BlockType(32, (2, *[4] * 4), 1, 32, _of_nibbles(False, False)),
    "Q4_1": BlockType(32, (2, 2, *[4] * 4), 1, 32, _of_nibbles(True, False)),
    "Q5_0": BlockType(32, (2, *[4] * 5), 1, 32, _of_nibbles(False, True)),
    "Q5_1": BlockType(32, (2, 2, *[4] * 5), 1, 32, _of_nibbles(True, True)),
    "Q4_K": BlockType(256, (2, 2, *[4] * 35), 8, 32, _of_superblocks(False)),
    "Q5_K": BlockType(256, (2, 2, *[4] * 43), 8, 32, _of_superblocks(True)),
    "Q6_K": BlockType(256, (*[4] * 52, 2), 8, 16, _q6_k),
}
