"""FP8 (e4m3) rows of the KV cache in Triton; `ops/fp8.py` defines the format.

Kernels multiply unscaled FP8 numbers, upcast to float16 (which is exact) or float32. The scores are
then multiplied by the scales of the keys. The scales of the values are powers of two. Their
exponents are added to the scores, so that exp2 gives probabilities that include these scales; the
softmax denominator sums probabilities without them. Probabilities are never rounded to fewer bits
than float16 has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.devices.cuda.kernels.dequantize import IS_INTERPRETED
from nanovllm.ops import fp8
from nanovllm.ops.fp8 import LARGEST_FP8

LARGEST = tl.constexpr(LARGEST_FP8)
MIN_EXPONENT = tl.constexpr(fp8.MIN_EXPONENT)
MAX_EXPONENT = tl.constexpr(fp8.MAX_EXPONENT)
NOT_FINITE = tl.constexpr(fp8.NOT_FINITE)
INFINITY_BITS = tl.constexpr(fp8.INFINITY_BITS)
ROUND_UP = tl.constexpr(fp8.ROUND_UP)
FP8_EXPONENT = tl.constexpr(fp8.FP8_EXPONENT)
LOG2_E = tl.constexpr(1.4426950408889634)
MIN_DOT_SIZE = tl.constexpr(16)  # minimum M, N and K of tl.dot
# Probabilities are scaled so that the largest is 2**14. This is below float16's maximum, and even
# much smaller probabilities remain normal numbers.
WEIGHT_EXPONENT = tl.constexpr(14)


@triton.jit
def power_of_two(exponents):  # type: ignore[no-untyped-def]
    """Return float32 powers of two with the given biased exponents (int32)."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """Return the bits of |x| (float32), which sort like |x|; NaN counts as infinity."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, INFINITY_BITS)


@triton.jit
def row_exponents(largest):  # type: ignore[no-untyped-def]
    """Return the scale exponents of rows from the magnitudes of their largest (finite) values."""
    exponents = ((largest + ROUND_UP) >> 23) - FP8_EXPONENT
    return tl.minimum(tl.maximum(exponents, MIN_EXPONENT), MAX_EXPONENT)


@triton.jit
def padded_range(count: tl.constexpr, least: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return tl.arange(0, n), where n is a power of two and at least `count` and `least`."""
    size: tl.constexpr = triton.next_power_of_2(count)
    return tl.arange(0, size if size > least else least)


@triton.jit
def hadamard_matrix(COLUMNS: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block-diagonal Hadamard matrix; each block mixes SIZE columns of half a head."""
    columns = tl.arange(0, COLUMNS)
    common = (columns[:, None] & columns[None, :]) % SIZE
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1  # bit 0 is now the parity of the original bits
    is_group = columns[:, None] // SIZE == columns[None, :] // SIZE
    return tl.where(is_group, 1.0 - 2.0 * (common & 1), 0.0).to(dtype)


@triton.jit
def hadamard_transform(first, second, matrix, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the Hadamard transform (float32) of rows, given as two halves [rows, columns]."""
    first = tl.dot(first, matrix, input_precision="ieee") * SCALE
    second = tl.dot(second, matrix, input_precision="ieee") * SCALE
    return first + second, first - second


@triton.jit
def quantize(first, second, pointers, is_row):  # type: ignore[no-untyped-def]
    """Quantize rows given as two halves; return the FP8 bits, and store the scale exponents."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    largest = tl.max(tl.maximum(magnitude(first), magnitude(second)), 1)
    exponents = row_exponents(largest)
    values = to_fp8(first, largest, exponents), to_fp8(second, largest, exponents)
    exponents = tl.where(largest >= INFINITY_BITS, NOT_FINITE, exponents)
    tl.store(pointers, exponents.to(tl.uint8)[:, None], mask=is_row)
    return values


@triton.jit
def to_fp8(x, largest, exponents):  # type: ignore[no-untyped-def]
    """Quantize float32 rows [rows, dims] to the bits of FP8 values."""
    scaled = x * power_of_two(254 - exponents)[:, None]
    size = tl.minimum(tl.abs(scaled), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Round to three bits of fraction, ties to even; below 2**-6 to multiples of 2**-9.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(bits < 0x3C800000, tiny, normal)
    rounded |= (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where((largest >= INFINITY_BITS)[:, None], 0x7F, rounded).to(tl.uint8)


@triton.jit
def prepare_queries(q_tile, scale):  # type: ignore[no-untyped-def]
    """Prepare queries to be multiplied by FP8 keys: return even and odd columns, and a new scale.

    16-bit queries become float16, which is more precise than bfloat16. They are multiplied by a
    power of two to fit float16's range, and `scale`, the factor of the scores, is adjusted.
    """
    if q_tile.dtype != tl.float32:
        wide = q_tile.to(tl.float32)
        largest = magnitude(wide)
        largest = tl.where(largest >= INFINITY_BITS, 0, largest)  # ignore NaN and infinity
        exponent = row_exponents(tl.max(tl.max(largest, 1), 0))
        q_tile = (wide * power_of_two(254 - exponent)).to(tl.float16)
        scale *= power_of_two(exponent)
    return split(q_tile), scale


@triton.jit
def split(x):  # type: ignore[no-untyped-def]
    """Return the even columns and the odd columns."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def join(even, odd):  # type: ignore[no-untyped-def]
    return tl.join(even, odd).reshape(even.shape[0], 2 * even.shape[1])


@triton.jit
def upcast_pairs(pairs, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Upcast FP8 values that were loaded in pairs (int16); return even columns and odd columns.

    Tensor cores read columns of 16-bit elements directly from shared memory; single FP8 values
    would be gathered byte by byte.
    """
    if IS_INTERPRETED:
        even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Two pairs form a word: bytes 0 and 2 are even columns, 1 and 3 odd ones. Without inline
        # PTX, the compiler would shift and mask each byte separately.
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes; .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even.to(dtype), odd.to(dtype)


@triton.jit
def load_exponents(  # type: ignore[no-untyped-def]
    exponents, rows, tile_start, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Load the scale exponents of a tile of keys and values; those past the end are arbitrary.

    `exponents` holds two pointers, for keys and values, to int32 words of four exponents: the words
    of this head in block 0. `rows` is the block id times KV_HEADS, for each key or for the
    whole tile (a scalar). Loads narrower than a word would not be pipelined.
    """
    words = tile_start // 4 + tl.arange(0, TILE // 4)
    offsets = words % (BLOCK_SIZE // 4)
    if len(rows.shape) == 0:
        offsets += rows * (BLOCK_SIZE // 4)
    else:
        offsets += tl.max(rows.reshape(TILE // 4, 4), 1) * (BLOCK_SIZE // 4)
    return _unpack(exponents[0] + offsets, TILE), _unpack(exponents[1] + offsets, TILE)


@triton.jit
def _unpack(words, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    shifts = 8 * tl.arange(0, 4)
    return ((tl.load(words)[:, None] >> shifts[None, :]) & 255).reshape(TILE)


@triton.jit
def scale_scores(scores, exponents, scale, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale the scores of FP8 keys for exp2, and add the scale exponents of the values."""
    key_scale = power_of_two(exponents[0]) * scale
    scores *= key_scale[None, :]
    if SOFTCAP is not None:
        scores = softcap(scores, SOFTCAP)
    return scores + (exponents[1] - 127).to(tl.float32)[None, :]


@triton.jit
def softcap(scores, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return CAP * tanh(scores / CAP)."""
    exponential = tl.exp2(scores * (2 * LOG2_E / CAP))
    return CAP - 2 * CAP / (1.0 + exponential)


@triton.jit
def weigh_fp8(scores, exponents, row_max, row_sum):  # type: ignore[no-untyped-def]
    """Like `_weigh` in attention_tiles.py, but for the results of `scale_scores`."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    top = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - (top - WEIGHT_EXPONENT)[:, None])
    alpha = tl.exp2(row_max - top)
    unscaled = weights * power_of_two(254 - exponents[1])[None, :]
    return weights, alpha, new_max, row_sum * alpha + tl.sum(unscaled, 1)


@triton.jit
def multiply_keys(queries, pairs):  # type: ignore[no-untyped-def]
    """Compute Q K^T of queries from `prepare_queries` and keys in pairs of FP8 values."""
    even, odd = upcast_pairs(pairs, queries[0].dtype)
    scores = tl.dot(queries[0], even.T, input_precision="ieee")
    return tl.dot(queries[1], odd.T, scores, input_precision="ieee")


@triton.jit
def add_values(acc, weights, pairs, alpha, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rescale both accumulators (of even and odd columns) by alpha, and add a tile's P V."""
    weights = weights.to(dtype)
    even, odd = upcast_pairs(pairs, dtype)
    even_sum = tl.dot(weights, even, acc[0] * alpha[:, None], input_precision="ieee")
    return even_sum, tl.dot(weights, odd, acc[1] * alpha[:, None], input_precision="ieee")
