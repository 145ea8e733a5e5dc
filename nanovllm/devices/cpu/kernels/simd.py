"""The hottest loops, in explicit vector code: compilers do not vectorize them reliably."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.devices.cpu.kernels.intrinsics import inlined, itemsize, load, prefetch, upcast_fp8

# Memory serves many requests in parallel, but a sequential reader issues few: hardware prefetchers
# stop at page boundaries. So each thread reads NUM_STREAMS distant rows in parallel, and prefetches
# AHEAD_BYTES ahead in each.
NUM_STREAMS = 4
TILE_ROWS = 4  # rows of x that share one read of the weight
TILE = NUM_STREAMS * TILE_ROWS  # sums of a tile, which fit in registers
_CPU = llvm.get_host_cpu_features()
# The float32 values that fit in a vector register; with longer vectors, tiles would spill.
LANES = 16 if _CPU.get("avx512f") else 8 if _CPU.get("avx") else 4
NUM_WEIGHTED = 64  # columns of a weighted sum that are kept in registers: a head, or half of one
LINE_BYTES = 64
AHEAD_BYTES = 2048


@inlined
def dot_tile(num_rows, a, a_base, stride, b, b_base, b_stride, count, sums):  # type: ignore[no-untyped-def]
    """Multiply NUM_STREAMS rows of `a` by `num_rows` rows of `b`; `num_rows` must be a constant.

    The dot products are stored in b[sums + row * NUM_STREAMS + stream]. Rows of `a` are `stride`
    apart. Plain loops handle the tail that does not fill a cache line.
    """
    per_line = LINE_BYTES // itemsize(a)
    num_whole = count // per_line * per_line
    _dot_lines(num_rows, a, a_base, stride, b, b_base, b_stride, num_whole, sums)
    for i in range(num_whole, count):
        for row in range(num_rows):
            for stream in range(NUM_STREAMS):
                product = load(a, a_base + stride * stream + i) * b[b_base + b_stride * row + i]
                b[sums + row * NUM_STREAMS + stream] += product


@intrinsic(prefer_literal=True)
def _dot_lines(context, num_rows, a, a_base, stride, b, b_base, b_stride, count, sums):  # type: ignore[no-untyped-def]
    """Compute the sums of `dot_tile` over whole cache lines in registers, and store them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, a, a_base, stride, b, b_base, b_stride, count, sums = args
        num_rows = signature.args[0].literal_value
        i64 = count.type
        itemsize = signature.args[1].dtype.bitwidth // 8
        per_line, ahead = LINE_BYTES // itemsize, AHEAD_BYTES // itemsize
        totals = [zero_variable(builder, LANES) for _ in range(num_rows * NUM_STREAMS)]
        a_bases = [builder.add(a_base, builder.mul(stride, i64(s))) for s in range(NUM_STREAMS)]
        b_bases = [builder.add(b_base, builder.mul(b_stride, i64(r))) for r in range(num_rows)]
        with cgutils.for_range(builder, builder.sdiv(count, i64(per_line))) as loop:
            offset = builder.mul(loop.index, i64(per_line))
            for base in a_bases:
                prefetch(builder, a, builder.add(builder.add(base, offset), i64(ahead)))
            for lane in range(0, per_line, LANES):
                index = builder.add(offset, i64(lane))
                rows = [_load_lanes(builder, b, builder.add(base, index)) for base in b_bases]
                for stream, base in enumerate(a_bases):
                    values = _load_lanes(builder, a, builder.add(base, index))
                    for total, row in zip(totals[stream::NUM_STREAMS], rows, strict=True):
                        _add_product(builder, total, values, row)
        for i, total in enumerate(totals):
            target = builder.gep(b, [builder.add(sums, i64(i))])
            builder.store(_sum_lanes(builder, total), target)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(num_rows, a, i64, i64, b, i64, i64, i64, i64), generate


@intrinsic
def add_weighted_lanes(
    context: Any, b: Any, sums: Any, a: Any, a_base: Any, stride: Any, weights: Any, count: Any
) -> Any:
    """Like `add_weighted` in dense.py, for NUM_WEIGHTED columns whose sums stay in registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, sums, a, a_base, stride, weights, count = args
        i64 = count.type
        offsets = [i64(lane) for lane in range(0, NUM_WEIGHTED, LANES)]
        totals = [zero_variable(builder, LANES) for _ in offsets]
        with cgutils.for_range(builder, count) as loop:
            weight = builder.load(builder.gep(b, [builder.add(weights, loop.index)]))
            same = broadcast_lanes(builder, weight, LANES)
            base = builder.add(a_base, builder.mul(stride, loop.index))
            for total, offset in zip(totals, offsets, strict=True):
                values = _load_lanes(builder, a, builder.add(base, offset))
                _add_product(builder, total, values, same)
        for total, offset in zip(totals, offsets, strict=True):
            index = builder.add(sums, offset)
            before = _load_lanes(builder, b, index)
            after = builder.fadd(before, builder.load(total))
            lanes = ir.VectorType(ir.FloatType(), LANES).as_pointer()
            builder.store(after, builder.bitcast(builder.gep(b, [index]), lanes), align=4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(b, i64, a, i64, i64, i64, i64), generate


def zero_variable(builder: Any, num_lanes: int) -> Any:
    lanes = ir.VectorType(ir.FloatType(), num_lanes)
    variable = cgutils.alloca_once(builder, lanes)
    builder.store(ir.Constant(lanes, None), variable)
    return variable


def broadcast_lanes(builder: Any, value: Any, num_lanes: int) -> Any:
    """Emit a vector with this value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, num_lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), num_lanes), None)
    return builder.shuffle_vector(first, undefined, mask)


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    product = builder.fmul(a, b, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def _load_lanes(builder: Any, pointer: Any, index: Any) -> Any:
    """Emit a load of LANES elements as float32."""
    element = pointer.type.pointee
    is_narrow = isinstance(element, ir.IntType)
    vector = ir.VectorType(element, LANES)
    address = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    values = builder.load(address, align=element.width // 8 if is_narrow else 4)
    if not is_narrow:
        return values
    words = ir.VectorType(ir.IntType(32), LANES)
    if element.width == 8:
        return upcast_fp8(builder, values, words, ir.VectorType(ir.FloatType(), LANES))
    bits = builder.shl(builder.zext(values, words), ir.Constant(words, [16] * LANES))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), LANES))


def _sum_lanes(builder: Any, total: Any) -> Any:
    lanes, scalar = ir.VectorType(ir.FloatType(), LANES), ir.FloatType()
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function_type = ir.FunctionType(scalar, [scalar, lanes])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    zero = ir.Constant(scalar, 0.0)
    return builder.call(function, [zero, builder.load(total)], fastmath=("reassoc",))
