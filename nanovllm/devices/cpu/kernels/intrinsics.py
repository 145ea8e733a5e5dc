"""Intrinsics that numba lacks: typed pointers, bfloat16 and FP8, calls by address, prefetch."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Operations may be reordered and fused, but NaN and infinity are preserved.
FAST = {"reassoc", "contract", "arcp", "nsz"}
# The error model lets division by zero return infinity: a check would prevent vectorization.
kernel = njit(fastmath=FAST, nogil=True, error_model="numpy")
# For kernels in which reordering could overflow, or that must match a reference bit for bit.
ordered_kernel = njit(fastmath={"contract"}, nogil=True, error_model="numpy")
inlined = njit(fastmath=FAST, nogil=True, error_model="numpy", inline="always")


# These are intrinsics because they are used everywhere: as functions that numba inlines, they would
# make compilation take a third longer.


@intrinsic
def load(context: Any, pointer: Any, index: Any) -> Any:
    """Read an element as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.gep(args[0], [args[1]]))
        if signature.args[0].dtype is types.uint8:
            return upcast_fp8(builder, value, ir.IntType(32), ir.FloatType())
        return value if signature.args[0].dtype is types.float32 else upcast_bf16(builder, value)

    return types.float32(pointer, types.int64), generate


@intrinsic
def store(context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write a float32, rounded to the element type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, index, value = args
        if signature.args[0].dtype is not types.float32:
            value = to_bf16_bits(builder, value)
        builder.store(value, builder.gep(pointer, [index]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


@intrinsic
def round_to(context: Any, value: Any, like: Any) -> Any:
    """Round a float32 to the type of `like` and back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1] is types.float32:
            return args[0]
        return upcast_bf16(builder, to_bf16_bits(builder, args[0]))

    return types.float32(types.float32, like), generate


@intrinsic
def itemsize(context: Any, pointer: Any) -> Any:
    """Return the number of bytes per element."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.IntType(64)(signature.args[0].dtype.bitwidth // 8)

    return types.int64(pointer), generate


@intrinsic
def is_fp8(context: Any, like: Any) -> Any:
    """Whether `like` is of type uint8, which holds the bits of FP8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.IntType(1)(int(signature.args[0] is types.uint8))

    return types.boolean(like), generate


def upcast_bf16(builder: Any, half: Any) -> Any:
    """Upcast the bits of a bfloat16 to float32."""
    i32 = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(half, i32), i32(16)), ir.FloatType())


def upcast_fp8(builder: Any, codes: Any, words: Any, floats: Any) -> Any:
    """Upcast the bits of FP8 (e4m3) values, a scalar or a vector, to float32; NaN is not supported.

    Shifted to their positions in float32, the bits have an exponent that is 120 too small.
    """
    bits = builder.zext(codes, words)
    size = builder.shl(builder.and_(bits, constant(words, 0x7F)), constant(words, 20))
    sign = builder.shl(builder.and_(bits, constant(words, 0x80)), constant(words, 24))
    value = builder.bitcast(builder.or_(size, sign), floats)
    return builder.fmul(value, constant(floats, 2.0**120))


def constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def to_bf16_bits(builder: Any, values: Any) -> Any:
    """Return the bits of a float32 scalar or vector rounded to bfloat16, ties to even."""
    words, halves = ir.IntType(32), ir.IntType(16)
    if isinstance(values.type, ir.VectorType):
        words, halves = (ir.VectorType(kind, values.type.count) for kind in (words, halves))
    bits = builder.bitcast(values, words)
    is_odd = builder.and_(builder.lshr(bits, constant(words, 16)), constant(words, 1))
    bits = builder.add(builder.add(bits, constant(words, 0x7FFF)), is_odd)
    return builder.trunc(builder.lshr(bits, constant(words, 16)), halves)


@intrinsic
def pointer_to(context: Any, address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.intp, like), generate


@intrinsic
def call(context: Any, address: Any) -> Any:
    """Call the C function at an address; it takes no arguments and returns an int or nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])

    return types.int32(types.int64), generate


@intrinsic
def call_kernel(
    context: Any, address: Any, args: Any, at: Any, thread: Any, num_threads: Any
) -> Any:
    """Call a separately compiled kernel with the arguments args[at:]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, args, at, thread, num_threads = values
        i64 = ir.IntType(64)
        function_type = ir.FunctionType(ir.VoidType(), [args.type, i64, i64])
        function = builder.inttoptr(address, function_type.as_pointer())
        builder.call(function, [builder.gep(args, [at]), thread, num_threads])
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, args, i64, i64, i64), generate


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def prefetch(builder: Any, pointer: Any, index: Any) -> None:
    byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    address = builder.bitcast(builder.gep(pointer, [index]), byte_pointer)
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
    name = "llvm.prefetch.p0"
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    builder.call(function, [address, i32(0), i32(3), i32(1)])  # read, all cache levels, data
