"""Rows of the cache as kernels write and weigh them: of the element type, or e4m3 codes.

`kernels/fp8_rows.py` says what codes are. Which of both a kernel has is known when it is compiled,
by the type of `cached`: uint8 stands for codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, types, uint8, uint32
from numba.extending import overload

from nanovllm.fp8 import LARGEST_FP8
from nanovllm.kernels.cpu.simd import FAST, as_bits, as_float, load, ordered_kernel, part, store
from nanovllm.kernels.fp8_rows import (
    CODE_EXPONENT,
    INFINITY_BITS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    NOT_FINITE,
    ROUND_UP,
)

OPTIONS = {"fastmath": FAST, "nogil": True, "error_model": "numpy"}
LARGEST_BITS = int(np.float32(LARGEST_FP8).view(np.uint32))
NORMAL_BITS = 0x3C800000  # of 2**-6
SHIFTED = 16384.0  # whose last bit is 2**-9
SHIFTED_BITS = 0x46800000


def store_row(
    cache: Any, base: int, exponents: Any, place: int, x: Any, first: int, dim: int, cached: Any
) -> None:
    """Store x[first : first + dim] at cache[base:], with its exponent, if any, at a place."""
    raise NotImplementedError


def spread_query(
    x: Any, base: int, b: Any, at: int, dim: int, size: int, scale: float, cached: Any
) -> None:
    """Spread the query at x[base:] if the cache has codes, by way of b[at:]."""
    raise NotImplementedError


def store_key(
    cache: Any,
    base: int,
    exponents: Any,
    place: int,
    x: Any,
    first: int,
    b: Any,
    at: int,
    dim: int,
    size: int,
    scale: float,
    cached: Any,
) -> None:
    """Like `store_row`, of a key: it is spread, by way of b[at:], if the cache has codes."""
    raise NotImplementedError


def scale_rows(b: Any, at: int, exponents: Any, place: int, count: int, cached: Any) -> None:
    """Multiply numbers from b[at] on by the scales of rows whose exponents begin at a place."""
    raise NotImplementedError


@overload(store_row, jit_options=OPTIONS)
def _store_row(cache, base, exponents, place, x, first, dim, cached):  # type: ignore[no-untyped-def]
    def copy(cache, base, exponents, place, x, first, dim, cached):  # type: ignore[no-untyped-def]
        for i in range(dim):
            cache[base + i] = x[first + i]

    def quantise(cache, base, exponents, place, x, first, dim, cached):  # type: ignore[no-untyped-def]
        largest = uint32(0)
        for i in range(dim):
            largest = max(largest, as_bits(load(x, first + i)) & uint32(0x7FFFFFFF))
        largest = min(largest, uint32(INFINITY_BITS))
        exponent = int64((largest + uint32(ROUND_UP)) >> uint32(23)) - CODE_EXPONENT
        exponent = min(max(exponent, int64(MIN_EXPONENT)), int64(MAX_EXPONENT))
        inverse = as_float(uint32(254 - exponent) << uint32(23))
        is_broken = largest == uint32(INFINITY_BITS)
        for i in range(dim):
            value = load(x, first + i)
            code = _round(as_bits(value * inverse) & uint32(0x7FFFFFFF))
            code |= as_bits(value) >> uint32(24) & uint32(0x80)
            cache[base + i] = uint8(0x7F) if is_broken else uint8(code)
        exponents[place] = uint8(NOT_FINITE) if is_broken else uint8(exponent)

    return quantise if cached is types.uint8 else copy


@overload(spread_query, jit_options=OPTIONS)
def _spread_query(x, base, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
    def leave(x, base, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
        pass

    def spread(x, base, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
        _spread(x, base, b, at, dim // 2, size, scale)
        for i in range(dim):
            store(x, base + i, b[at + i])

    return spread if cached is types.uint8 else leave


@overload(store_key, jit_options=OPTIONS)
def _store_key(cache, base, exponents, place, x, first, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
    def copy(cache, base, exponents, place, x, first, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
        store_row(cache, base, exponents, place, x, first, dim, cached)

    def spread(cache, base, exponents, place, x, first, b, at, dim, size, scale, cached):  # type: ignore[no-untyped-def]
        _spread(x, first, b, at, dim // 2, size, scale)
        store_row(cache, base, exponents, place, b, at, dim, cached)

    return spread if cached is types.uint8 else copy


@ordered_kernel
def _spread(x: Any, base: int, b: Any, at: int, half: int, size: int, scale: float) -> None:
    """Set b[at:] to what `fp8_rows.spread` returns, bit for bit."""
    for i in range(half):
        first, second = load(x, base + i) * scale, load(x, base + half + i) * scale
        b[at + i] = first + second
        b[at + half + i] = first - second
    width = 1
    while width < size:
        for group in range(at, at + 2 * half, 2 * width):
            for i in range(group, group + width):
                first, second = b[i], b[i + width]
                b[i] = first + second
                b[i + width] = first - second
        width *= 2


@overload(scale_rows, jit_options=OPTIONS)
def _scale_rows(b, at, exponents, place, count, cached):  # type: ignore[no-untyped-def]
    def leave(b, at, exponents, place, count, cached):  # type: ignore[no-untyped-def]
        pass

    def scale(b, at, exponents, place, count, cached):  # type: ignore[no-untyped-def]
        for i in range(count):
            b[at + i] *= as_float(uint32(exponents[place + i]) << uint32(23))

    return scale if cached is types.uint8 else leave


@part
def _round(bits: Any) -> Any:
    """The code of a number that is not negative, by its bits: of two codes the even one."""
    bits = min(bits, uint32(LARGEST_BITS))
    if bits < uint32(NORMAL_BITS):  # to a multiple of 2**-9
        return as_bits(as_float(bits) + float32(SHIFTED)) - uint32(SHIFTED_BITS)
    is_odd = bits >> uint32(20) & uint32(1)
    return ((bits + uint32(0x7FFFF) + is_odd) >> uint32(20)) - uint32(960)
