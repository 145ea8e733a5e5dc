"""Write rows of the KV cache in the model's dtype or in FP8, and apply the scales of FP8 rows.

`ops/fp8.py` defines the FP8 format. The type of `cached` selects the format when a kernel is
compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, uint8, uint32

from nanovllm.devices.cpu.kernels.intrinsics import (
    as_bits,
    as_float,
    inlined,
    is_fp8,
    kernel,
    load,
    ordered_kernel,
)
from nanovllm.ops.fp8 import (
    FP8_EXPONENT,
    INFINITY_BITS,
    LARGEST_FP8,
    MAX_EXPONENT,
    MIN_EXPONENT,
    NOT_FINITE,
    ROUND_UP,
)

LARGEST_BITS = int(np.float32(LARGEST_FP8).view(np.uint32))
NORMAL_BITS = 0x3C800000  # bits of 2**-6, the smallest normal FP8 value
# The last mantissa bit of this float32 is 2**-9, the smallest subnormal FP8 value. Adding a smaller
# number to it therefore rounds that number to a multiple of 2**-9.
SHIFTED = 16384.0
SHIFTED_BITS = 0x46800000


@inlined
def find_row(
    offset: int, kv_head: int, num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[int, int]:
    """Return the index of a row's first element in the cache, and that of its exponent.

    `offset` is the token's position in the cache, in units of tokens.
    """
    place = (offset // block_size * num_kv_heads + kv_head) * block_size + offset % block_size
    return (offset * num_kv_heads + kv_head) * head_dim, place


@inlined
def store_row(
    cache: Any, base: int, exponents: Any, place: int, x: Any, first: int, dim: int, cached: Any
) -> None:
    """Store x[first : first + dim] at cache[base:]; in FP8, also set exponents[place]."""
    if is_fp8(cached):
        quantize_row(cache, base, exponents, place, x, first, dim)
    else:
        for i in range(dim):
            cache[base + i] = x[first + i]


@inlined
def scale_rows(b: Any, at: int, exponents: Any, place: int, count: int, cached: Any) -> None:
    """For an FP8 cache, multiply b[at + i] by the scale that exponents[place + i] encodes."""
    if is_fp8(cached):
        for i in range(count):
            b[at + i] *= as_float(uint32(exponents[place + i]) << uint32(23))


@kernel
def quantize_row(
    cache: Any, base: int, exponents: Any, place: int, x: Any, first: int, dim: int
) -> None:
    largest = uint32(0)
    for i in range(dim):
        largest = max(largest, as_bits(load(x, first + i)) & uint32(0x7FFFFFFF))
    largest = min(largest, uint32(INFINITY_BITS))
    exponent = int64((largest + uint32(ROUND_UP)) >> uint32(23)) - FP8_EXPONENT
    exponent = min(max(exponent, int64(MIN_EXPONENT)), int64(MAX_EXPONENT))
    inverse = as_float(uint32(254 - exponent) << uint32(23))
    is_broken = largest == uint32(INFINITY_BITS)
    for i in range(dim):
        value = load(x, first + i)
        code = _round(as_bits(value * inverse) & uint32(0x7FFFFFFF))
        code |= as_bits(value) >> uint32(24) & uint32(0x80)
        cache[base + i] = uint8(0x7F) if is_broken else uint8(code)
    exponents[place] = uint8(NOT_FINITE) if is_broken else uint8(exponent)


@ordered_kernel
def hadamard_transform(
    x: Any, base: int, b: Any, at: int, half: int, size: int, scale: float
) -> None:
    """Store the Hadamard transform of x[base:] in b[at:], bitwise equal to fp8.py's result."""
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


@inlined
def _round(bits: Any) -> Any:
    """Return the FP8 bits of a nonnegative float32, given as bits; ties round to even."""
    bits = min(bits, uint32(LARGEST_BITS))
    if bits < uint32(NORMAL_BITS):  # subnormal: round to a multiple of 2**-9
        return as_bits(as_float(bits) + float32(SHIFTED)) - uint32(SHIFTED_BITS)
    is_odd = bits >> uint32(20) & uint32(1)
    return ((bits + uint32(0x7FFFF) + is_odd) >> uint32(20)) - uint32(960)
