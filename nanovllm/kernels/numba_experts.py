"""CPU kernels for mixtures of experts, which numba_kernels.py runs by number.

Every thread has its share of the outputs of every expert, so that all have the same work however
the tokens are spread. What is counted in pairs is one token with one of its experts each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64

from nanovllm.kernels.numba_simd import (
    NUM_STREAMS,
    TILE,
    TILE_ROWS,
    dot_row,
    dot_tile,
    kernel,
    load,
    pointer_to,
    round_to,
    store,
)


@kernel
def route(args: Any, at: int, thread: int, num_threads: int, like: Any) -> None:
    """Set ids and weights (float32) of each token's experts, the best first."""
    ids, weights = pointer_to(args[at], int32(0)), pointer_to(args[at + 1], float32(0))
    logits, num_tokens, num_experts = pointer_to(args[at + 2], like), args[at + 3], args[at + 4]
    top_k, is_normalized = args[at + 5], args[at + 6] != 0
    begin, end = thread * num_tokens // num_threads, (thread + 1) * num_tokens // num_threads
    for token in range(begin, end):
        line, pair = token * num_experts, token * top_k
        for choice in range(top_k):
            ids[pair + choice] = _best_after(ids, pair, choice, logits, line, num_experts)
        largest, total = load(logits, line + ids[pair]), float32(0)
        for i in range(top_k):
            weights[pair + i] = np.exp(load(logits, line + ids[pair + i]) - largest)
            total += weights[pair + i]
        if not is_normalized:
            total = float32(0)
            for i in range(num_experts):
                total += np.exp(load(logits, line + i) - largest)
        for i in range(top_k):
            weights[pair + i] = round_to(weights[pair + i] / total, like)


@kernel
def _best_after(ids: Any, pair: int, choice: int, logits: Any, line: int, count: int) -> int:
    """The largest logit's place, the lower of equals, among those not yet chosen."""
    best, largest = int64(-1), float32(0)
    for i in range(count):
        value, is_free = load(logits, line + i), True
        if best >= 0 and not value > largest:
            continue
        for j in range(choice):
            is_free = is_free and ids[pair + j] != i
        if is_free:
            best, largest = i, value
    return best


@kernel
def group(args: Any, at: int, thread: int, num_threads: int, like: Any) -> None:
    """Sort pairs by expert: starts[expert] is the place of its first one in order."""
    order, starts = pointer_to(args[at], int32(0)), pointer_to(args[at + 1], int32(0))
    ids, num_pairs, num_experts = pointer_to(args[at + 2], int32(0)), args[at + 3], args[at + 4]
    if thread != 0:
        return
    for i in range(num_experts + 1):
        starts[i] = 0
    for pair in range(num_pairs):
        starts[ids[pair] + 1] += 1
    for i in range(num_experts):
        starts[i + 1] += starts[i]
    for pair in range(num_pairs):  # each start runs on to the next one's place
        order[starts[ids[pair]]] = pair
        starts[ids[pair]] += 1
    for i in range(num_experts, 0, -1):
        starts[i] = starts[i - 1]
    starts[0] = 0


@kernel
def grouped_linear(args: Any, at: int, thread: int, num_threads: int, like: Any) -> None:
    """y[pair] = x[pair // per_row] @ weight[expert of the pair].T.

    `scratch` holds, per thread, the sums of a tile and as float32 the rows of an expert, which are
    at most `max_rows`, in whole tiles.
    """
    y, x, weight = (
        pointer_to(args[at], like),
        pointer_to(args[at + 1], like),
        pointer_to(args[at + 2], like),
    )
    order, starts = pointer_to(args[at + 3], int32(0)), pointer_to(args[at + 4], int32(0))
    scratch, max_rows = pointer_to(args[at + 5], float32(0)), args[at + 6]
    num_experts, per_row = args[at + 7], args[at + 8]
    num_out, num_in = args[at + 9], args[at + 10]
    sums = thread * (max_rows * num_in + TILE)
    xs = sums + TILE
    begin, end = thread * num_out // num_threads, (thread + 1) * num_out // num_threads
    per_stream = (end - begin) // NUM_STREAMS
    for expert in range(num_experts):
        first, num_rows = int64(starts[expert]), int64(starts[expert + 1] - starts[expert])
        if num_rows == 0:
            continue
        for row in range((num_rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS):
            source = order[first + min(row, num_rows - 1)] // per_row * num_in
            for i in range(num_in):
                scratch[xs + row * num_in + i] = load(x, source + i)
        lines = expert * num_out * num_in
        for i in range(begin, begin + per_stream):
            _multiply(
                y,
                weight,
                lines,
                i,
                per_stream,
                scratch,
                xs,
                sums,
                order,
                first,
                num_rows,
                num_out,
                num_in,
            )
        for i in range(begin + per_stream * NUM_STREAMS, end):
            _multiply(
                y, weight, lines, i, 0, scratch, xs, sums, order, first, num_rows, num_out, num_in
            )


@kernel
def _multiply(  # type: ignore[no-untyped-def]
    y, weight, lines, out, per_stream, scratch, xs, sums, order, first, num_rows, num_out, num_in
):
    """Multiply the lines at `out` of each stream, `per_stream` apart, with all rows."""
    base, stride = lines + out * num_in, per_stream * num_in
    for row in range(0, num_rows, TILE_ROWS):
        count = min(TILE_ROWS, num_rows - row)
        if count == 1:
            dot_row(weight, base, stride, scratch, xs + row * num_in, num_in, num_in, sums)
        else:
            dot_tile(weight, base, stride, scratch, xs + row * num_in, num_in, num_in, sums)
        for j in range(count):
            target = int64(order[first + row + j]) * num_out + out
            for stream in range(NUM_STREAMS):
                store(y, target + stream * per_stream, scratch[sums + j * NUM_STREAMS + stream])


@kernel
def add_choices(args: Any, at: int, thread: int, num_threads: int, like: Any) -> None:
    """out[token] = the sum over its choices of weight * y."""
    out, y = pointer_to(args[at], like), pointer_to(args[at + 1], like)
    weights, num_tokens = pointer_to(args[at + 2], float32(0)), args[at + 3]
    top_k, dim = args[at + 4], args[at + 5]
    begin, end = thread * dim // num_threads, (thread + 1) * dim // num_threads
    for token in range(num_tokens):
        for i in range(begin, end):
            total = float32(0)
            for pair in range(token * top_k, (token + 1) * top_k):
                total += weights[pair] * load(y, pair * dim + i)
            store(out, token * dim + i, total)
