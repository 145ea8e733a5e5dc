"""FP8 (e4m3): scaled rows of weights and activations, and rows of the KV cache.

A row of the KV cache has one scale, a power of two. Dividing by it is exact, so every device
quantizes to the same values, and a dequantized value is exact in bfloat16: kernels may scale keys,
scores or probabilities alike. The scale is stored as the exponent of a float32, in one byte.

Keys have outliers, always in the same few columns, where queries have theirs; quantized directly,
these would decide the error of a score. So queries and keys are multiplied by a Hadamard matrix
first (`hadamard_transform`), which leaves their dot products as they are and levels the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
SMALLEST_SCALE = 2.0**-126  # which zeros have: one over it is finite

# Scales are 2**-63 to 2**119: with the largest, the largest code is still a float32. Rows that are
# not finite have codes of NaN, and an exponent that makes infinity of any code that large.
MIN_EXPONENT, MAX_EXPONENT, NOT_FINITE = 64, 246, 254
INFINITY_BITS = 0x7F800000
# Added to a float32's bits, it carries into the exponent from a fraction beyond 1.75 on: 448 is
# 1.75 * 2**8.
ROUND_UP, CODE_EXPONENT = 0x1FFFFF, 8


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    values: Tensor  # FP8
    scales: Tensor  # float32


def quantize_fp8(x: Tensor, largest: Tensor) -> Fp8Tensor:
    """Round numbers to codes; `largest` has one number for each scale, and broadcasts."""
    # A tensor over a tensor: torch multiplies by one over a number, which may round differently.
    scales = largest / torch.full_like(largest, LARGEST_FP8)
    scales.clamp_(min=SMALLEST_SCALE)
    values = (x * scales.reciprocal()).clamp_(-LARGEST_FP8, LARGEST_FP8)
    return Fp8Tensor(values.to(FP8), scales)


def quantize_rows(x: Tensor) -> Fp8Tensor:
    """Round rows [rows, columns] of float32, each by its largest number."""
    return quantize_fp8(x, x.abs().amax(1, keepdim=True))


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    values: Tensor  # [..., dim], e4m3
    exponents: Tensor  # [...], uint8


def quantize(rows: Tensor) -> Fp8Rows:
    """Round rows [..., dim] to codes by the smallest scale that lets all of them be codes."""
    wide = rows.float()
    bits = wide.abs().contiguous().view(torch.int32).amax(-1)  # ordered as what they stand for
    exponents = ((bits.clamp(max=INFINITY_BITS) + ROUND_UP) >> 23) - CODE_EXPONENT
    exponents = exponents.clamp(MIN_EXPONENT, MAX_EXPONENT)
    scaled = wide * power_of_two(254 - exponents).unsqueeze(-1)
    is_broken = bits >= INFINITY_BITS
    scaled = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(is_broken.unsqueeze(-1), torch.nan)
    exponents = exponents.masked_fill(is_broken, NOT_FINITE)
    return Fp8Rows(scaled.to(FP8), exponents.to(torch.uint8))


def dequantize(rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """Return the numbers that rows stand for, which bfloat16 and wider types hold exactly."""
    scales = power_of_two(rows.exponents.int()).unsqueeze(-1)
    if dtype != torch.float16:
        return rows.values.to(dtype) * scales.to(dtype)
    largest = torch.finfo(dtype).max  # which the rounding to a code may have left behind
    return (rows.values.float() * scales).clamp(-largest, largest).to(dtype)


def hadamard_size(head_dim: int) -> int:
    """Columns of a half of a head that are spread over each other: a power of two."""
    half = head_dim // 2
    return half & -half


def hadamard_exponents(head_dim: int) -> tuple[int, int]:
    """Exponents that undo the length of the matrix' columns: of queries, and of keys."""
    exponent = hadamard_size(head_dim).bit_length()
    return -((exponent + 1) // 2), -(exponent // 2)


def hadamard_transform(x: Tensor, exponent: int) -> Tensor:
    """Multiply rows [..., dim] by a Hadamard matrix and a power of two, in float32.

    It adds and subtracts the halves of a row, then mixes groups of `hadamard_size` columns of each.
    """
    size = hadamard_size(x.shape[-1])
    first, second = (x.float() * 2.0**exponent).chunk(2, dim=-1)
    x = torch.cat((first + second, first - second), dim=-1)
    width = 1
    while width < size:
        first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        width *= 2
    return x


def power_of_two(exponents: Tensor) -> Tensor:
    """The float32 that has some exponents (int32), and no fraction."""
    return (exponents << 23).view(torch.float32)
