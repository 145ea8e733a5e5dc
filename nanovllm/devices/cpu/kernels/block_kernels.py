"""Kernels that read GGUF quant blocks: a skinny GEMM (few rows of x), and dequantization.

Weights are stored in panels, which interleave the quant blocks of 16 rows (block_types.py). Each
kernel is compiled for one quant block type when a model first needs it. Programs call kernels by
address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import torch
from numba import float32, int32, int64, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.devices.cpu.kernels.block_types import (
    FLOATS,
    I64,
    PANEL_ROWS,
    TYPES,
    WORDS,
    Block,
    BlockType,
    Group,
    broadcast,
)
from nanovllm.devices.cpu.kernels.interpreter import ZERO_OF, Compiler, hash_sources
from nanovllm.devices.cpu.kernels.intrinsics import (
    as_float,
    constant,
    kernel,
    load,
    pointer_to,
    prefetch,
    round_to,
    store,
    to_bf16_bits,
)
from nanovllm.devices.cpu.kernels.simd import LANES, LINE_BYTES, zero_variable

NAMES = list(TYPES)
# Numbers of rows of x that may share one read of the weight. Their sums have to fit in registers;
# only AVX-512 has enough of them for eight rows.
TILES = (8 if LANES == PANEL_ROWS else 4), 4, 2, 1
AHEAD_BYTES = 4096


@intrinsic(prefer_literal=True)
def multiply_panel(
    context: Any,
    kind: Any,
    num_rows: Any,
    panel: Any,
    num_blocks: Any,
    b: Any,
    xs: Any,
    x_sums: Any,
    target: Any,
) -> Any:
    """Multiply a panel by rows of x; store the dot products in b[target + 16 * row + lane].

    b[xs:] holds the rows of x, and b[x_sums:] their sums over groups of columns.
    """
    block_type, count = TYPES[NAMES[kind.literal_value]], num_rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, panel, num_blocks, b, xs, x_sums, target = args
        num_in, num_groups = block_type.size, block_type.size // block_type.group_size
        rows = [builder.add(xs, builder.mul(num_blocks, I64(r * num_in))) for r in range(count)]
        sums = [
            builder.add(x_sums, builder.mul(num_blocks, I64(r * num_groups))) for r in range(count)
        ]
        totals = [zero_variable(builder, PANEL_ROWS) for _ in rows]

        def add(group: Group, column: Any) -> None:
            _add_group(builder, block_type, group, column, b, rows, sums, totals)

        _for_groups(builder, block_type, panel, num_blocks, add)
        for row, total in enumerate(totals):
            index = builder.add(target, I64(row * PANEL_ROWS))
            _store(builder, builder.load(total), builder.gep(b, [index]))
        return context.get_dummy_value()

    i64 = types.int64
    signature = types.void(kind, num_rows, i64, i64, b, i64, i64, i64)
    return signature, generate


def _add_group(
    builder: Any,
    kind: BlockType,
    group: Group,
    column: Any,
    b: Any,
    rows: list[Any],
    sums: list[Any],
    totals: list[Any],
) -> None:
    """Multiply a group's columns by rows of x; scale the sums, and add them to `totals`."""
    num_parts = max(4 // len(rows), 1)  # an addition takes four cycles: keep four in flight
    index = builder.sdiv(column, I64(kind.group_size))
    x_sums: list[Any] = []
    values, scale, offset = _to_multiply(builder, group)
    if group.low is not None or offset:
        addresses = [builder.gep(b, [builder.add(base, index)]) for base in sums]
        x_sums = [broadcast(builder, builder.load(address)) for address in addresses]
    parts = [[constant(FLOATS, 0.0)] * num_parts for _ in rows]
    if offset:
        for part, x_sum in zip(parts, x_sums, strict=True):
            part[0] = builder.fmul(x_sum, constant(FLOATS, -offset))
    for i in range(kind.group_size):
        column_values = values(i)
        for part, base in zip(parts, rows, strict=True):
            address = builder.gep(b, [builder.add(builder.add(base, column), I64(i))])
            x = broadcast(builder, builder.load(address))
            part[i % num_parts] = _multiply_add(builder, column_values, x, part[i % num_parts])
    for row, (part, total) in enumerate(zip(parts, totals, strict=True)):
        while len(part) > 1:
            part[:] = [builder.fadd(*pair) for pair in zip(part[::2], part[1::2], strict=True)]
        new = _multiply_add(builder, scale, part[0], builder.load(total))
        if group.low is not None:
            new = _multiply_add(builder, group.low, x_sums[row], new)
        builder.store(new, total)


def _to_multiply(builder: Any, group: Group) -> tuple[Callable[[int], Any], Any, float]:
    """Return a function that emits a column, and the scale and offset to apply to it.

    The weights minus `group.low` are scale * (column - offset).
    """
    if group.fraction is None:
        return lambda i: builder.sitofp(group.integer(i), FLOATS), group.scale, group.offset
    scale = builder.fmul(group.scale, constant(FLOATS, 16.0))
    return group.fraction, scale, 1 + group.offset / 16


@intrinsic(prefer_literal=True)
def dequantize_panel(
    context: Any, kind: Any, panel: Any, num_blocks: Any, out: Any, first: Any, stride: Any
) -> Any:
    """Dequantize a panel: set out[first + stride * lane + column] to its weights."""
    block_type = TYPES[NAMES[kind.literal_value]]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, panel, num_blocks, out, first, stride = args

        def write(group: Group, column: Any) -> None:
            for i in range(0, block_type.group_size, PANEL_ROWS):
                columns = [_dequantize_column(builder, group, i + j) for j in range(PANEL_ROWS)]
                if isinstance(out.type.pointee, ir.IntType):
                    columns = [to_bf16_bits(builder, values) for values in columns]
                at = builder.add(builder.add(first, column), I64(i))
                for lane, values in enumerate(_transpose(builder, columns)):
                    index = builder.add(at, builder.mul(stride, I64(lane)))
                    _store(builder, values, builder.gep(out, [index]))

        _for_groups(builder, block_type, panel, num_blocks, write)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(kind, i64, i64, out, i64, i64), generate


def _dequantize_column(builder: Any, group: Group, column: int) -> Any:
    """Emit code for one column of weights, with the same rounding as `gguf.quants.dequantize`."""
    values = builder.sitofp(group.integer(column), FLOATS)
    if group.offset:
        values = builder.fadd(values, constant(FLOATS, -group.offset))
    values = builder.fmul(values, group.scale)
    return values if group.low is None else builder.fadd(values, group.low)


def _transpose(builder: Any, columns: list[Any]) -> list[Any]:
    """Transpose PANEL_ROWS vectors of PANEL_ROWS lanes."""
    half = PANEL_ROWS // 2
    pairs = [lane for i in range(PANEL_ROWS) for lane in (i, i + PANEL_ROWS)]
    for _ in range(PANEL_ROWS.bit_length() - 1):  # each round interleaves vectors i and i + half
        columns = [
            builder.shuffle_vector(columns[i], columns[i + half], ir.Constant(WORDS, part))
            for i in range(half)
            for part in (pairs[:PANEL_ROWS], pairs[PANEL_ROWS:])
        ]
    return columns


def _for_groups(builder: Any, kind: BlockType, panel: Any, num_blocks: Any, use: Any) -> None:
    """Emit a loop over the groups of a panel; `use(group, first column)` emits its body."""
    num_bytes, num_steps = kind.num_bytes * PANEL_ROWS, kind.num_steps
    step_bytes = num_bytes // num_steps
    # A single loop: the compiler would unroll the inner one of two nested loops.
    with cgutils.for_range(builder, builder.mul(num_blocks, I64(num_steps))) as loop:
        step = builder.and_(loop.index, I64(num_steps - 1))
        at = builder.mul(builder.udiv(loop.index, I64(num_steps)), I64(num_bytes))
        address = builder.inttoptr(builder.add(panel, at), ir.IntType(8).as_pointer())
        here = builder.add(builder.mul(step, I64(step_bytes)), I64(AHEAD_BYTES))
        for line in range(0, step_bytes, LINE_BYTES):
            prefetch(builder, address, builder.add(here, I64(line)))
        column = builder.mul(loop.index, I64(kind.size // num_steps))
        for group in kind.groups(Block(builder, address, kind.units), step):
            use(group, column)
            column = builder.add(column, I64(kind.group_size))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    product = builder.fmul(a, b, flags=("contract",))
    return builder.fadd(product, c, flags=("contract",))


def _store(builder: Any, values: Any, address: Any) -> None:
    builder.store(values, builder.bitcast(address, values.type.as_pointer()), align=2)


# The closure variables of these kernels must be equal in every process: numba's cache key includes
# them.


def compile_linear(
    compiler: Compiler, name: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> Any:
    """Compile the kernel that computes y = x @ weight.T + bias for few rows of x.

    The bias has the dtype of x, y has `out_dtype`. The kernel may fill only some columns of y. If
    the address of `order` is not 0, y has a row for each (token, expert) pair, as in grouped_linear
    in experts.py. `scratch` holds, per thread, the sums of a tile, then x as float32 and its sums
    over groups.
    """
    kind, block_type = NAMES.index(name), TYPES[name]
    size, num_bytes, group_size = block_type.size, block_type.num_bytes, block_type.group_size
    version, like, out_like = hash_sources(), ZERO_OF[dtype], ZERO_OF[out_dtype]
    (large, small, pair, one), lanes = TILES, PANEL_ROWS

    def linear(args, thread, num_threads):  # type: ignore[no-untyped-def]
        weight, scratch, max_rows = args[2], pointer_to(args[4], float32(0)), args[5] + 0 * version
        num_out, num_in, starts = args[6], args[7], pointer_to(args[10], int32(0))
        num_blocks, num_groups = num_in // size, num_in // group_size
        sums = thread * (max_rows * (num_in + num_groups) + large * lanes)
        xs = sums + large * lanes
        x_sums = xs + max_rows * num_in
        num_panels = (num_out + lanes - 1) // lanes
        panel_bytes = num_blocks * num_bytes * lanes
        begin, end = thread * num_panels // num_threads, (thread + 1) * num_panels // num_threads
        for expert in range(args[11]):
            first, num_rows = int64(0), max_rows
            if args[9] != 0:
                first = int64(starts[expert])
                num_rows = int64(starts[expert + 1]) - first
            gather_x(args, first, num_rows, scratch, xs, like)
            add_groups(scratch, xs, x_sums, num_rows * num_groups, group_size)
            for i in range(begin, end):
                panel = weight + (expert * num_panels + i) * panel_bytes
                row = 0
                while row < num_rows:
                    at, at_sums = xs + row * num_in, x_sums + row * num_groups
                    if row + large <= num_rows:
                        num_done = large
                        multiply_panel(kind, large, panel, num_blocks, scratch, at, at_sums, sums)
                    elif row + small <= num_rows:
                        num_done = small
                        multiply_panel(kind, small, panel, num_blocks, scratch, at, at_sums, sums)
                    elif row + pair <= num_rows:
                        num_done = pair
                        multiply_panel(kind, pair, panel, num_blocks, scratch, at, at_sums, sums)
                    else:
                        num_done = one
                        multiply_panel(kind, one, panel, num_blocks, scratch, at, at_sums, sums)
                    target = first + row, num_done, i * lanes
                    write_sums(args, *target, scratch, sums, like, out_like)
                    row += num_done

    return compiler.compile(linear)


@kernel
def gather_x(args: Any, first: int, num_rows: int, scratch: Any, xs: int, like: Any) -> None:
    """Upcast rows of x to float32 and write them to `scratch`.

    With experts, row i is that of the (token, expert) pair order[first + i].
    """
    x, num_in, order = pointer_to(args[1], like), args[7], pointer_to(args[9], int32(0))
    for row in range(num_rows):
        source = row if args[9] == 0 else int64(order[first + row]) // args[12]
        for i in range(num_in):
            scratch[xs + row * num_in + i] = load(x, source * num_in + i)


@kernel
def add_groups(scratch: Any, xs: int, x_sums: int, num_groups: int, size: int) -> None:
    for i in range(num_groups):
        total = float32(0)
        for j in range(size):
            total += scratch[xs + i * size + j]
        scratch[x_sums + i] = total


@kernel
def write_sums(
    args: Any, first: int, num_rows: int, out: int, sums: Any, base: int, like: Any, out_like: Any
) -> None:
    """Add the bias to the sums of a tile, and store them in y.

    The tile starts at column `out`, and at row `first` or, with experts, at pair order[first].
    """
    y, bias = pointer_to(args[0], out_like), pointer_to(args[3], like)
    order, count = pointer_to(args[9], int32(0)), min(int64(PANEL_ROWS), args[6] - out)
    for j in range(num_rows):
        row = first + j if args[9] == 0 else int64(order[first + j])
        for i in range(count):
            value = sums[base + j * PANEL_ROWS + i]
            if args[3] != 0:
                value += load(bias, out + i)
            store(y, row * args[8] + out + i, value)


def compile_dequantizer(
    compiler: Compiler, name: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> Any:
    """Compile the kernel that dequantizes panels, or looks up rows of an embedding table.

    Dequantized panels are stored as rows: out[16 * panel + lane, column]. A lookup stores the table
    row of token_ids[i], scaled, in rows[i]; `out` is then scratch memory for a panel per thread.
    """
    kind, size, num_bytes = NAMES.index(name), TYPES[name].size, TYPES[name].num_bytes
    like, out_like = ZERO_OF[dtype], ZERO_OF[out_dtype]
    lanes, version = PANEL_ROWS, hash_sources()

    def dequantize(args, thread, num_threads):  # type: ignore[no-untyped-def]
        out, weight, num_in = pointer_to(args[0], out_like), args[1], args[2] + 0 * version
        count, rows = args[3], pointer_to(args[4], like)
        token_ids, scale = pointer_to(args[5], int32(0)), as_float(uint32(args[6]))
        is_lookup, num_blocks = args[4] != 0, num_in // size
        panel_bytes = num_blocks * num_bytes * lanes
        for i in range(thread * count // num_threads, (thread + 1) * count // num_threads):
            index, first = i, i * num_in * lanes
            if is_lookup:
                index, first = token_ids[i] // lanes, thread * num_in * lanes
            dequantize_panel(kind, weight + index * panel_bytes, num_blocks, out, first, num_in)
            if is_lookup:
                row = first + token_ids[i] % lanes * num_in
                for j in range(num_in):
                    value = round_to(load(out, row + j), like)
                    store(rows, i * num_in + j, value * scale)

    return compiler.compile(dequantize)
