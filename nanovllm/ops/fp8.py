"""FP8 (e4m3) quantization of weights and activations, and of the KV cache.

Each row of the KV cache (one head of one token) has one scale, a power of two. Dividing by it is
exact, so every device quantizes to the same values. A dequantized value is exact in bfloat16, so
kernels may apply the scale to keys, scores or probabilities. Only the biased exponent of the scale
is stored, in one byte.

Keys have outliers in the same few columns as queries. Quantized directly, these columns would
dominate the error of the attention scores. So queries and keys are first multiplied by a Hadamard
matrix (`hadamard_transform`), which preserves their dot products and evens out the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
SMALLEST_SCALE = 2.0**-126  # scale of all-zero rows; its reciprocal is finite

# Scales range from 2**-63 to 2**119, so that 448 times the largest scale is a finite float32. A row
# with NaN or infinity stores NaN values and the exponent NOT_FINITE.
MIN_EXPONENT, MAX_EXPONENT, NOT_FINITE = 64, 246, 254
INFINITY_BITS = 0x7F800000
# Adding ROUND_UP to the bits of a float32 carries into its exponent if the significand exceeds
# 1.75: the largest FP8 value, 448, is 1.75 * 2**8.
ROUND_UP, FP8_EXPONENT = 0x1FFFFF, 8


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    values: Tensor  # FP8
    scales: Tensor  # float32


def quantize_fp8(x: Tensor, largest: Tensor) -> Fp8Tensor:
    """Quantize x; `largest`, which broadcasts to x, holds each scale group's largest magnitude."""
    # The divisor is a tensor: with a Python number, torch multiplies by the reciprocal, which may
    # round differently.
    scales = largest / torch.full_like(largest, LARGEST_FP8)
    scales.clamp_(min=SMALLEST_SCALE)
    values = (x * scales.reciprocal()).clamp_(-LARGEST_FP8, LARGEST_FP8)
    return Fp8Tensor(values.to(FP8), scales)


def quantize_rows(x: Tensor) -> Fp8Tensor:
    """Quantize float32 rows [rows, columns], each scaled by its largest absolute value."""
    return quantize_fp8(x, x.abs().amax(1, keepdim=True))


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    values: Tensor  # [..., dim], e4m3
    exponents: Tensor  # [...], uint8


def quantize(rows: Tensor) -> Fp8Rows:
    """Quantize rows [..., dim], each with the smallest scale that keeps its values in range."""
    wide = rows.float()
    bits = wide.abs().contiguous().view(torch.int32).amax(-1)  # these integers sort like the floats
    exponents = ((bits.clamp(max=INFINITY_BITS) + ROUND_UP) >> 23) - FP8_EXPONENT
    exponents = exponents.clamp(MIN_EXPONENT, MAX_EXPONENT)
    scaled = wide * power_of_two(254 - exponents).unsqueeze(-1)
    is_broken = bits >= INFINITY_BITS
    scaled = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(is_broken.unsqueeze(-1), torch.nan)
    exponents = exponents.masked_fill(is_broken, NOT_FINITE)
    return Fp8Rows(scaled.to(FP8), exponents.to(torch.uint8))


def dequantize(rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """Return the dequantized rows, which are exact in bfloat16 and wider types."""
    scales = power_of_two(rows.exponents.int()).unsqueeze(-1)
    if dtype != torch.float16:
        return rows.values.to(dtype) * scales.to(dtype)
    largest = torch.finfo(dtype).max  # rounding up to an FP8 value may exceed it
    return (rows.values.float() * scales).clamp(-largest, largest).to(dtype)


def hadamard_size(head_dim: int) -> int:
    """Return the transform's group size: the largest power of two that divides head_dim / 2."""
    half = head_dim // 2
    return half & -half


def hadamard_exponents(head_dim: int) -> tuple[int, int]:
    """Return the `exponent` arguments of `hadamard_transform` for queries and for keys.

    Together they divide by the size of the matrix, so that dot products are unchanged.
    """
    exponent = hadamard_size(head_dim).bit_length()
    return -((exponent + 1) // 2), -(exponent // 2)


def hadamard_transform(x: Tensor, exponent: int) -> Tensor:
    """Multiply rows [..., dim] by a Hadamard matrix and a power of two, in float32.

    The halves of a row are added and subtracted; then each half is transformed in groups of
    `hadamard_size` columns.
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
    """Return float32 numbers with these biased exponents (int32) and a mantissa of zero."""
    return (exponents << 23).view(torch.float32)
