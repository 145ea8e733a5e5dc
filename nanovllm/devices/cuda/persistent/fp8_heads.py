"""Quantization of new keys and values for an FP8 cache, and of the queries that multiply its keys.

`ops/fp8.py` defines the format; kernels/fp8_rows.py is the counterpart for steps that run layer by
layer. A head vector is split among the lanes of a warp: each lane has two adjacent elements of
either half.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.ops import fp8

MIN_EXPONENT = gl.constexpr(fp8.MIN_EXPONENT)
MAX_EXPONENT = gl.constexpr(fp8.MAX_EXPONENT)
ROUND_UP = gl.constexpr(fp8.ROUND_UP)
FP8_EXPONENT = gl.constexpr(fp8.FP8_EXPONENT)
# Exponents of the factors of queries and of keys in the Hadamard transform, for 64 and 128 columns.
HADAMARD = gl.constexpr(tuple(fp8.hadamard_exponents(dim) for dim in (64, 128)))
# Probabilities are scaled so that the largest is 2**14, as in kernels/fp8_rows.py.
WEIGHT_EXPONENT = gl.constexpr(14.0)

PACK_FP8 = gl.constexpr(
    "{ .reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, $2, $1; cvt.u32.u16 $0, e; }"
)


@gluon.jit
def power_of_two(exponents):
    """Return float32 powers of two with the given biased exponents (int32)."""
    return (exponents << 23).to(gl.float32, bitcast=True)


@gluon.jit
def pack_fp8(a, b):
    """Round two float32 to FP8, and pack them into 16 bits."""
    return gl.inline_asm_elementwise(PACK_FP8, "=r,f,f", [a, b], gl.int32, True, 1).to(gl.int16)


@gluon.constexpr_function
def upcast_asm(target, source):
    """Return PTX that upcasts two FP8 values, in the 16-bit register `source`, to float16."""
    return f"cvt.rn.f16x2.e4m3x2 {target}, {source}; "


@gluon.constexpr_function
def swap_asm(distance):
    """Return PTX that exchanges a value with the lane whose index differs in one bit."""
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"


@gluon.constexpr_function
def num_lane_bits(dim):
    """Return the number of bits of a lane's index in half a head vector: dim / 4 lanes."""
    return (dim // 4).bit_length() - 1


@gluon.constexpr_function
def hadamard_scale(dim, index):
    """Return the factor of the Hadamard transform of queries (index 0) or of keys (index 1)."""
    return 2.0 ** HADAMARD.value[dim // 128][index]


@gluon.jit
def hadamard_transform(x0, x1, y0, y1, column, is_query, DIM: gl.constexpr):
    """Transform head vectors: (x0, x1) of the first half, (y0, y1) of the second half.

    `column` is the lane's index in half a head vector. The order of the sums is that of
    `ops.fp8.hadamard_transform`.
    """
    scale = gl.where(is_query, hadamard_scale(DIM, 0), hadamard_scale(DIM, 1))
    x0, x1, y0, y1 = x0 * scale, x1 * scale, y0 * scale, y1 * scale
    x0, x1, y0, y1 = x0 + y0, x1 + y1, x0 - y0, x1 - y1
    values = x0 + x1, x0 - x1, y0 + y1, y0 - y1
    for i in gl.static_range(num_lane_bits(DIM)):
        is_second, found = (column >> i) % 2 == 1, ()
        for n in gl.static_range(4):
            own = values[n]
            other = gl.inline_asm_elementwise(swap_asm(1 << i), "=f,f", [own], gl.float32, False, 1)
            found = found + (other + gl.where(is_second, -own, own),)
        values = found
    return values


@gluon.jit
def scale_rows(x0, x1, y0, y1):
    """Divide head vectors by their scales; return the quotients and the biased exponents."""
    largest = gl.maximum(gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(y0), gl.abs(y1)))
    bits = gl.max(largest, 1).to(gl.int32, bitcast=True)
    exponents = ((bits + ROUND_UP) >> 23) - FP8_EXPONENT
    exponents = gl.minimum(gl.maximum(exponents, MIN_EXPONENT), MAX_EXPONENT)
    inverse = gl.expand_dims(power_of_two(254 - exponents), 1)
    return (x0 * inverse, x1 * inverse, y0 * inverse, y1 * inverse), exponents
