"""CPU kernels, compiled by numba.

`args` points to int64 values. Unless stated otherwise, addresses among them point to elements of
the type of `like`: float32, or uint16 for the bits of bfloat16. Floats are passed as the bits of a
float32. All arithmetic is float32. A call does part `thread` of `num_threads` equal parts of the
work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, uint8, uint32

from nanovllm.devices.cpu.kernels.cache_rows import (
    find_row,
    hadamard_transform,
    quantize_row,
    scale_rows,
    store_row,
)
from nanovllm.devices.cpu.kernels.intrinsics import (
    as_float,
    inlined,
    is_fp8,
    kernel,
    load,
    ordered_kernel,
    pointer_to,
    round_to,
    store,
)
from nanovllm.devices.cpu.kernels.simd import (
    NUM_STREAMS,
    NUM_WEIGHTED,
    TILE,
    TILE_ROWS,
    add_weighted_lanes,
    dot_tile,
)

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)


@kernel
def embed(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """out[row] = scale * table[token_ids[row]]."""
    out, table = pointer_to(args[0], like), pointer_to(args[1], like)
    token_ids = pointer_to(args[2], int32(0))
    num_rows, dim, scale = args[3], args[4], as_float(uint32(args[5]))
    for row in range(thread * num_rows // num_threads, (thread + 1) * num_rows // num_threads):
        for i in range(dim):
            store(out, row * dim + i, load(table, token_ids[row] * dim + i) * scale)


@kernel
def linear(args: Any, thread: int, num_threads: int, like: Any, out_like: Any) -> None:
    """y = x @ weight.T + bias for few rows of x; a bias address of 0 means no bias.

    `out_like` has the type of y. `scratch` holds, per thread, x as float32 and the sums of a tile.
    """
    y, x = pointer_to(args[0], out_like), pointer_to(args[1], like)
    weight, bias = pointer_to(args[2], like), pointer_to(args[3], like)
    has_bias = args[3] != 0
    scratch = pointer_to(args[4], float32(0))
    num_rows, num_out, num_in = args[5], args[6], args[7]
    xs = thread * (num_rows * num_in + TILE)
    sums = xs + num_rows * num_in
    for i in range(num_rows * num_in):
        scratch[xs + i] = load(x, i)
    per_stream = num_out // (num_threads * NUM_STREAMS)
    first = thread * NUM_STREAMS * per_stream
    stride = per_stream * num_in
    for i in range(first, first + per_stream):
        row = 0
        while row < num_rows:
            base = xs + row * num_in
            if row + TILE_ROWS <= num_rows:
                count = TILE_ROWS
                dot_tile(TILE_ROWS, weight, i * num_in, stride, scratch, base, num_in, num_in, sums)
            else:
                count = 1
                dot_tile(1, weight, i * num_in, stride, scratch, base, num_in, num_in, sums)
            for j in range(count * NUM_STREAMS):
                out = i + j % NUM_STREAMS * per_stream
                value = scratch[sums + j]
                if has_bias:
                    value += load(bias, out)
                store(y, (row + j // NUM_STREAMS) * num_out + out, value)
            row += count
    for out in range(num_threads * NUM_STREAMS * per_stream + thread, num_out, num_threads):
        for row in range(num_rows):
            value = _dot(weight, out * num_in, scratch, xs + row * num_in, num_in)
            if has_bias:
                value += load(bias, out)
            store(y, row * num_out + out, value)


@kernel
def norm(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """out = rms_norm(residual); if `out` holds an update, it is first added to the residual.

    Rows are `stride` elements apart.
    """
    out, residual = pointer_to(args[0], like), pointer_to(args[1], like)
    weight, eps = pointer_to(args[2], float32(0)), as_float(uint32(args[3]))
    num_rows, dim, stride, is_update = args[4], args[5], args[6], args[7] != 0
    for row in range(thread * num_rows // num_threads, (thread + 1) * num_rows // num_threads):
        base = row * stride
        if is_update:
            for i in range(base, base + dim):
                store(residual, i, load(residual, i) + load(out, i))
        _rms_norm(out, residual, base, weight, eps, dim, like)


@kernel
def add_norm(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """residual += rms_norm(x); x is overwritten."""
    residual, x = pointer_to(args[0], like), pointer_to(args[1], like)
    weight, eps = pointer_to(args[2], float32(0)), as_float(uint32(args[3]))
    num_rows, dim = args[4], args[5]
    for row in range(thread * num_rows // num_threads, (thread + 1) * num_rows // num_threads):
        base = row * dim
        _rms_norm(x, x, base, weight, eps, dim, like)
        for i in range(base, base + dim):
            store(residual, i, load(residual, i) + load(x, i))


@ordered_kernel
def act_and_mul(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """out = activation(gate) * up; each row of gate_up holds gate, then up.

    The activation is gate * sigmoid(gate * (linear + cubic * gate**2)).
    """
    out, gate_up = pointer_to(args[0], like), pointer_to(args[1], like)
    num_rows, size = args[2], args[3]
    linear, cubic = as_float(uint32(args[4])), as_float(uint32(args[5]))
    begin, end = thread * size // num_threads, (thread + 1) * size // num_threads
    for row in range(num_rows):
        gates, ups, outs = 2 * row * size, (2 * row + 1) * size, row * size
        for i in range(begin, end):
            gate = load(gate_up, gates + i)
            # The bound avoids 0 * inf, which is NaN.
            bent = gate * (linear + cubic * min(gate * gate, float32(1e30)))
            active = round_to(gate / (float32(1) + _exp(-bent)), like)
            store(out, outs + i, active * load(gate_up, ups + i))


@kernel
def multiply_sigmoid(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """x = base + x * sigmoid(gate), with one gate per element or per row.

    A base address of 0 means no base.
    """
    x, gate = pointer_to(args[0], like), pointer_to(args[1], like)
    base, has_base = pointer_to(args[2], like), args[2] != 0
    num_rows, size, gate_stride, is_single = args[3], args[4], args[5], args[6] != 0
    begin, end = thread * size // num_threads, (thread + 1) * size // num_threads
    for row in range(num_rows):
        for i in range(begin, end):
            value = load(gate, row * gate_stride + (0 if is_single else i))
            value = load(x, row * size + i) / (float32(1) + _exp(-value))
            if has_base:
                value += load(base, row * size + i)
            store(x, row * size + i, value)


@kernel
def scale_logits(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """Implement Ops.scale_logits in place, in float32; a softcap of 0 means none."""
    logits, size = pointer_to(args[0], float32(0)), args[1]
    scale, softcap = as_float(uint32(args[2])), as_float(uint32(args[3]))
    for i in range(thread * size // num_threads, (thread + 1) * size // num_threads):
        value = load(logits, i) * scale
        if softcap > 0:
            value = _softcap(value, softcap)
        store(logits, i, value)


@kernel
def rope_write(args: Any, thread: int, num_threads: int, like: Any, cached: Any) -> None:
    """Implement Ops.rope_write; `cached` has the type of the KV cache.

    Norm addresses of 0 mean no norm.
    """
    qkv, rope = pointer_to(args[0], like), pointer_to(args[1], float32(0))
    q_norm, k_norm = pointer_to(args[2], float32(0)), pointer_to(args[3], float32(0))
    has_norm, eps = args[2] != 0, as_float(uint32(args[4]))
    positions, slot_mapping = pointer_to(args[5], int64(0)), pointer_to(args[6], int64(0))
    k_cache, v_cache = pointer_to(args[7], cached), pointer_to(args[8], cached)
    num_tokens, num_heads = args[9], args[10]
    num_kv_heads, head_dim, block_size, rope_stride = args[11], args[12], args[13], args[14]
    token_stride = args[15]
    k_exponents, v_exponents = pointer_to(args[16], uint8(0)), pointer_to(args[17], uint8(0))
    scratch, size = pointer_to(args[18], float32(0)), args[19]
    of_q, of_k = as_float(uint32(args[20])), as_float(uint32(args[21]))
    num_rotated = num_heads + num_kv_heads
    per_token = num_rotated + num_kv_heads
    num_items = num_tokens * per_token
    begin, end = thread * num_items // num_threads, (thread + 1) * num_items // num_threads
    for item in range(begin, end):
        token, head = item // per_token, item % per_token
        base = token * token_stride + head * head_dim
        if head < num_rotated:
            if has_norm:
                weight = q_norm if head < num_heads else k_norm
                _rms_norm(qkv, qkv, base, weight, eps, head_dim, like)
            angle = positions[token] * rope_stride
            if head < num_heads:  # if q has its own angles, they follow those of k
                angle += rope_stride - head_dim
            _rotate(qkv, base, rope, angle, head_dim // 2)
        transform_at, half = thread * head_dim, head_dim // 2
        if head < num_heads:
            if is_fp8(cached):
                hadamard_transform(qkv, base, scratch, transform_at, half, size, of_q)
                for i in range(head_dim):
                    store(qkv, base + i, scratch[transform_at + i])
            continue
        kv_head, offset = (head - num_heads) % num_kv_heads, slot_mapping[token]
        row, place = find_row(offset, kv_head, num_kv_heads, head_dim, block_size)
        if head >= num_rotated:
            store_row(v_cache, row, v_exponents, place, qkv, base, head_dim, cached)
        elif is_fp8(cached):
            hadamard_transform(qkv, base, scratch, transform_at, half, size, of_k)
            quantize_row(k_cache, row, k_exponents, place, scratch, transform_at, head_dim)
        else:
            store_row(k_cache, row, k_exponents, place, qkv, base, head_dim, cached)


@kernel
def attend(args: Any, thread: int, num_threads: int, like: Any, cached: Any) -> None:
    """Compute attention of one query token per row; `cached` has the type of the KV cache.

    NumbaAttention lists the arguments. For each thread, `scratch` holds the queries and outputs of
    a group of query heads, and their scores at all positions.
    """
    out, q, q_stride = pointer_to(args[0], like), pointer_to(args[1], like), args[2]
    k_cache, v_cache = pointer_to(args[3], cached), pointer_to(args[4], cached)
    tables, table_stride = pointer_to(args[5], int32(0)), args[6]
    tokens, lengths = pointer_to(args[7], int64(0)), pointer_to(args[8], int32(0))
    scratch = pointer_to(args[9], float32(0))
    num_rows, max_length, num_heads = args[10], args[11], args[12]
    num_kv_heads, head_dim, block_size = args[13], args[14], args[15]
    scale, window, softcap = as_float(uint32(args[16])), args[17], as_float(uint32(args[18]))
    sinks, has_sinks = pointer_to(args[19], float32(0)), args[19] != 0
    k_exponents, v_exponents = pointer_to(args[20], uint8(0)), pointer_to(args[21], uint8(0))
    group = num_heads // num_kv_heads
    queries = thread * group * (2 * head_dim + max_length)
    sums = queries + group * head_dim
    scores = sums + group * head_dim
    stride = num_kv_heads * head_dim
    # Each thread takes every num_threads-th (row, KV head) pair, so all threads share long rows.
    for item in range(thread, num_rows * num_kv_heads, num_threads):
        row, kv_head = item // num_kv_heads, item % num_kv_heads
        length, table = int64(lengths[row]), row * table_stride
        first = max(length - window, 0)
        first_head = kv_head * group * head_dim
        for i in range(group * head_dim):
            scratch[queries + i] = load(q, tokens[row] * q_stride + first_head + i) * scale
            scratch[sums + i] = float32(0)
        for block in range(first // block_size, (length + block_size - 1) // block_size):
            begin, count = _span(block, block_size, first, length)
            offset = tables[table + block] * block_size + begin % block_size
            base, place = find_row(offset, kv_head, num_kv_heads, head_dim, block_size)
            for i in range(group):
                query, score = queries + i * head_dim, scores + i * max_length + begin
                _dots(k_cache, base, stride, scratch, query, head_dim, score, count)
                scale_rows(scratch, score, k_exponents, place, count, cached)
                if softcap > 0:
                    for j in range(score, score + count):
                        scratch[j] = _softcap(scratch[j], softcap)
        for i in range(group):
            at = scores + i * max_length + first
            sink = sinks[kv_head * group + i] if has_sinks else scratch[at]
            _softmax(scratch, at, length - first, sink, has_sinks)
        for block in range(first // block_size, (length + block_size - 1) // block_size):
            begin, count = _span(block, block_size, first, length)
            offset = tables[table + block] * block_size + begin % block_size
            base, place = find_row(offset, kv_head, num_kv_heads, head_dim, block_size)
            for i in range(group):
                probs = scores + i * max_length + begin
                scale_rows(scratch, probs, v_exponents, place, count, cached)
                add_weighted(
                    scratch, sums + i * head_dim, v_cache, base, stride, probs, count, head_dim
                )
        for i in range(group * head_dim):
            store(out, tokens[row] * num_heads * head_dim + first_head + i, scratch[sums + i])


@inlined
def _span(block: int, block_size: int, first: int, length: int) -> tuple[int, int]:
    """Return the first position of a block from `first` on, and how many lie below `length`."""
    begin = max(block * block_size, first)
    return begin, min((block + 1) * block_size, length) - begin


@inlined
def _rms_norm(out: Any, x: Any, base: int, weight: Any, eps: float, dim: int, like: Any) -> None:
    total = float32(0)
    for i in range(base, base + dim):
        value = load(x, i)
        total += value * value
    scale = float32(1) / np.sqrt(total / float32(dim) + eps)
    for i in range(dim):
        value = round_to(load(x, base + i) * scale, like)
        store(out, base + i, value * load(weight, i))


@inlined
def _rotate(x: Any, base: int, rope: Any, angle: int, half: int) -> None:
    for i in range(half):
        first, second = load(x, base + i), load(x, base + half + i)
        cos, sin = rope[angle + i], rope[angle + half + i]
        store(x, base + i, first * cos - second * sin)
        store(x, base + half + i, second * cos + first * sin)


@kernel
def _softmax(x: Any, base: int, count: int, sink: float, has_sink: bool) -> None:
    """Compute a softmax in place; if `has_sink`, the sink counts as a score."""
    largest = sink
    for i in range(count):
        largest = max(largest, x[base + i])
    total = _exp(sink - largest) if has_sink else float32(0)
    for i in range(count):
        value = _exp(x[base + i] - largest)
        x[base + i] = value
        total += value
    for i in range(count):
        x[base + i] /= total


@inlined
def _softcap(x: Any, cap: float) -> Any:
    """Return cap * tanh(x / cap)."""
    return cap - (cap + cap) / (float32(1) + _exp((x + x) / cap))


@inlined
def _exp(x: Any) -> Any:
    """Return e ** x with an error of at most 1e-6, in steps that a compiler can vectorize."""
    # Results below e**-60 are negligible: callers add them to 1, or to a sum that contains a 1 (in
    # a softmax). Denormals would be slow. From 88.4 on, the power of two is rightly infinity.
    x = min(max(x, float32(-60)), float32(89))
    power = np.floor(x * LOG2_E + float32(0.5))
    rest = x - power * LN_2  # within +-0.35, where a Taylor polynomial of degree 6 is accurate
    series = rest * float32(1 / 720) + float32(1 / 120)
    series = series * rest + float32(1 / 24)
    series = series * rest + float32(1 / 6)
    series = series * rest + float32(1 / 2)
    series = series * rest + float32(1)
    series = series * rest + float32(1)
    return series * as_float(uint32(int32(power) + int32(127)) << uint32(23))


@inlined
def _dot(a: Any, a_base: int, b: Any, b_base: int, count: int) -> Any:
    """Return the sum of a[i] * b[i]; b is float32, here and below."""
    total = float32(0)
    for i in range(count):
        total += load(a, a_base + i) * b[b_base + i]
    return total


@inlined
def _dots(
    a: Any, a_base: int, stride: int, b: Any, b_base: int, dim: int, sums: int, count: int
) -> None:
    """Set b[sums + i] to the dot product of row i of a and b[b_base:]; rows are `stride` apart."""
    num_whole = count // NUM_STREAMS * NUM_STREAMS
    for i in range(0, num_whole, NUM_STREAMS):
        dot_tile(1, a, a_base + i * stride, stride, b, b_base, 0, dim, sums + i)
    for i in range(num_whole, count):
        b[sums + i] = _dot(a, a_base + i * stride, b, b_base, dim)


@inlined
def add_weighted(
    b: Any, sums: int, a: Any, a_base: int, stride: int, weights: int, count: int, dim: int
) -> None:
    """Add the rows of a to b[sums:], each multiplied by its weight in b[weights:]."""
    num_wide = dim // NUM_WEIGHTED * NUM_WEIGHTED
    for begin in range(0, num_wide, NUM_WEIGHTED):
        add_weighted_lanes(b, sums + begin, a, a_base + begin, stride, weights, count)
    for i in range(count):
        weight, base = b[weights + i], a_base + i * stride
        for j in range(num_wide, dim):
            b[sums + j] += weight * load(a, base + j)
