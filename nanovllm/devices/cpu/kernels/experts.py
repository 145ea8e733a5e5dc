"""CPU kernels for MoE layers.

Every thread computes a share of the outputs of every expert, so the work is balanced however tokens
are routed. A pair is one token with one of its experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64

from nanovllm.devices.cpu.kernels.intrinsics import kernel, load, pointer_to, round_to, store
from nanovllm.devices.cpu.kernels.simd import NUM_STREAMS, dot_tile

# Experts get few rows, so every number of rows up to this limit has its own unrolled kernel. With
# more than 24 accumulators, registers would spill.
MAX_TILE_ROWS = 6
EXPERT_TILE = MAX_TILE_ROWS * NUM_STREAMS


@kernel
def route(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """Store the ids and routing weights (float32) of each token's top-k experts, best first."""
    ids, weights = pointer_to(args[0], int32(0)), pointer_to(args[1], float32(0))
    logits, num_tokens, num_experts = pointer_to(args[2], like), args[3], args[4]
    top_k, is_normalized = args[5], args[6] != 0
    begin, end = thread * num_tokens // num_threads, (thread + 1) * num_tokens // num_threads
    for token in range(begin, end):
        row_start, pair = token * num_experts, token * top_k
        for choice in range(top_k):
            ids[pair + choice] = _best_after(ids, pair, choice, logits, row_start, num_experts)
        largest, total = load(logits, row_start + ids[pair]), float32(0)
        for i in range(top_k):
            weights[pair + i] = np.exp(load(logits, row_start + ids[pair + i]) - largest)
            total += weights[pair + i]
        if not is_normalized:
            total = float32(0)
            for i in range(num_experts):
                total += np.exp(load(logits, row_start + i) - largest)
        for i in range(top_k):
            weights[pair + i] = round_to(weights[pair + i] / total, like)


@kernel
def _best_after(ids: Any, pair: int, choice: int, logits: Any, row_start: int, count: int) -> int:
    """Return the index of the largest logit not yet chosen; ties go to the lower index."""
    best, largest = int64(-1), float32(0)
    for i in range(count):
        value, is_free = load(logits, row_start + i), True
        if best >= 0 and not value > largest:
            continue
        for j in range(choice):
            is_free = is_free and ids[pair + j] != i
        if is_free:
            best, largest = i, value
    return best


@kernel
def sort_pairs(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """Sort pairs by expert into `order`; starts[expert] is the index of the expert's first pair."""
    order, starts = pointer_to(args[0], int32(0)), pointer_to(args[1], int32(0))
    ids, num_pairs, num_experts = pointer_to(args[2], int32(0)), args[3], args[4]
    if thread != 0:
        return
    for i in range(num_experts + 1):
        starts[i] = 0
    for pair in range(num_pairs):
        starts[ids[pair] + 1] += 1
    for i in range(num_experts):
        starts[i + 1] += starts[i]
    for pair in range(num_pairs):  # starts[expert] advances to the start of the next expert
        order[starts[ids[pair]]] = pair
        starts[ids[pair]] += 1
    for i in range(num_experts, 0, -1):
        starts[i] = starts[i - 1]
    starts[0] = 0


@kernel
def grouped_linear(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """y[pair] = x[pair // per_row] @ weight[expert of the pair].T.

    `scratch` holds, per thread, the sums of a tile, and up to `max_rows` rows of x in float32: the
    rows of the current expert.
    """
    y, x = pointer_to(args[0], like), pointer_to(args[1], like)
    weight = pointer_to(args[2], like)
    order, starts = pointer_to(args[3], int32(0)), pointer_to(args[4], int32(0))
    scratch, max_rows = pointer_to(args[5], float32(0)), args[6]
    num_experts, per_row = args[7], args[8]
    num_out, num_in = args[9], args[10]
    sums = thread * (max_rows * num_in + EXPERT_TILE)
    xs = sums + EXPERT_TILE
    begin, end = thread * num_out // num_threads, (thread + 1) * num_out // num_threads
    apart = (end - begin) // NUM_STREAMS
    last = end - (NUM_STREAMS - 1) * apart  # end of the first stream's rows; streams may overlap
    for expert in range(num_experts):
        first, num_rows = int64(starts[expert]), int64(starts[expert + 1] - starts[expert])
        for row in range(num_rows):
            source = order[first + row] // per_row * num_in
            for i in range(num_in):
                scratch[xs + row * num_in + i] = load(x, source + i)
        for out in range(begin, last):
            row_start = (expert * num_out + out) * num_in
            for row in range(0, num_rows, MAX_TILE_ROWS):
                count = min(MAX_TILE_ROWS, num_rows - row)
                x_row, stride = xs + row * num_in, apart * num_in
                _dot_tile(weight, row_start, stride, scratch, x_row, num_in, sums, count)
                for j in range(count * NUM_STREAMS):
                    pair = order[first + row + j // NUM_STREAMS]
                    index = pair * num_out + out + j % NUM_STREAMS * apart
                    store(y, index, scratch[sums + j])


@kernel
def _dot_tile(
    a: Any, a_base: int, stride: int, b: Any, b_base: int, dim: int, sums: int, count: int
) -> None:
    """Compute the dot products of four rows of `a` with `count` (<= MAX_TILE_ROWS) rows of `b`."""
    if count == 1:
        dot_tile(1, a, a_base, stride, b, b_base, dim, dim, sums)
    elif count == 2:
        dot_tile(2, a, a_base, stride, b, b_base, dim, dim, sums)
    elif count == 3:
        dot_tile(3, a, a_base, stride, b, b_base, dim, dim, sums)
    elif count == 4:
        dot_tile(4, a, a_base, stride, b, b_base, dim, dim, sums)
    elif count == 5:
        dot_tile(5, a, a_base, stride, b, b_base, dim, dim, sums)
    else:
        dot_tile(6, a, a_base, stride, b, b_base, dim, dim, sums)


@kernel
def add_choices(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """out[token] = sum of weight * y over the token's experts."""
    out, y = pointer_to(args[0], like), pointer_to(args[1], like)
    weights, num_tokens = pointer_to(args[2], float32(0)), args[3]
    top_k, dim = args[4], args[5]
    begin, end = thread * dim // num_threads, (thread + 1) * dim // num_threads
    for token in range(num_tokens):
        for i in range(begin, end):
            total = float32(0)
            for pair in range(token * top_k, (token + 1) * top_k):
                total += weights[pair] * load(y, pair * dim + i)
            store(out, token * dim + i, total)
