"""The CPU kernel of Gated DeltaNet, in the recurrent form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, uint32

from nanovllm.devices.cpu.kernels.dense import add_weighted
from nanovllm.devices.cpu.kernels.intrinsics import (
    as_float,
    inlined,
    kernel,
    load,
    pointer_to,
    store,
)


@kernel
def gated_delta_net(args: Any, thread: int, num_threads: int, like: Any) -> None:
    """Implement Ops.gated_delta_net; without `offsets`, each row has one token.

    NumbaOps lists the arguments. Each thread takes one key head of one row at a time,
    with the value heads that share it. For each thread, `scratch` holds the q, k and v of a head,
    and either the update of its state or its output.
    """
    out, qkv, z = pointer_to(args[0], like), pointer_to(args[1], like), pointer_to(args[2], like)
    b, a = pointer_to(args[3], like), pointer_to(args[4], like)
    qkv_stride, z_stride, b_stride, a_stride = args[5], args[6], args[7], args[8]
    conv, log_decay = pointer_to(args[9], like), pointer_to(args[10], float32(0))
    dt_bias, norm = pointer_to(args[11], float32(0)), pointer_to(args[12], float32(0))
    eps = as_float(uint32(args[13]))
    state, state_stride = pointer_to(args[14], float32(0)), args[15]
    history, history_stride = pointer_to(args[16], like), args[17]
    slots = pointer_to(args[18], int64(0))
    offsets, has_offsets = pointer_to(args[19], int64(0)), args[19] != 0
    scratch = pointer_to(args[20], float32(0))
    num_rows, key_heads, group = args[21], args[22], args[23]
    key_dim, value_dim, conv_size, is_tiled = args[24], args[25], args[26], args[27] != 0
    q = thread * 2 * (key_dim + value_dim)
    k, v = q + key_dim, q + 2 * key_dim
    change = v + value_dim
    num_keys, size = key_heads * key_dim, key_heads * group * value_dim
    for item in range(thread, num_rows * key_heads, num_threads):
        row, key_head = item // key_heads, item % key_heads
        first = offsets[row] if has_offsets else row
        last = offsets[row + 1] if has_offsets else row + 1
        past = slots[row] * history_stride
        for token in range(first, last):
            x = token * qkv_stride
            channel = key_head * key_dim
            _convolve(scratch, q, qkv, x, history, past, conv, channel, key_dim, conv_size)
            channel += num_keys
            _convolve(scratch, k, qkv, x, history, past, conv, channel, key_dim, conv_size)
            _normalize(scratch, q, key_dim, float32(1) / np.sqrt(float32(key_dim)))
            _normalize(scratch, k, key_dim, float32(1))
            for member in range(group):
                head = key_head * group + member
                if is_tiled:
                    head = key_head + member * key_heads
                channel = 2 * num_keys + head * value_dim
                _convolve(scratch, v, qkv, x, history, past, conv, channel, value_dim, conv_size)
                base = slots[row] * state_stride + head * key_dim * value_dim
                dt = load(a, token * a_stride + head) + dt_bias[head]
                decay = np.exp(log_decay[head] * _softplus(dt))
                beta = float32(1) / (float32(1) + np.exp(-load(b, token * b_stride + head)))
                for i in range(change, change + value_dim):
                    scratch[i] = float32(0)
                add_weighted(scratch, change, state, base, value_dim, k, key_dim, value_dim)
                for i in range(value_dim):
                    prediction = decay * scratch[change + i]
                    scratch[change + i] = beta * (scratch[v + i] - prediction)
                for i in range(key_dim):
                    weight, at = scratch[k + i], base + i * value_dim
                    for j in range(value_dim):
                        state[at + j] = decay * state[at + j] + weight * scratch[change + j]
                y = change
                for i in range(y, y + value_dim):
                    scratch[i] = float32(0)
                add_weighted(scratch, y, state, base, value_dim, q, key_dim, value_dim)
                total = float32(0)
                for i in range(y, y + value_dim):
                    total += scratch[i] * scratch[i]
                scale = float32(1) / np.sqrt(total / float32(value_dim) + eps)
                for i in range(value_dim):
                    gate = _silu(load(z, token * z_stride + head * value_dim + i))
                    value = scratch[y + i] * scale * norm[i] * gate
                    store(out, token * size + head * value_dim + i, value)


@inlined
def _convolve(
    y: Any,
    y_base: int,
    x: Any,
    x_base: int,
    history: Any,
    past: int,
    conv: Any,
    channel: int,
    count: int,
    conv_size: int,
) -> None:
    """Set y to silu(conv(x)) for `count` channels, and append x to their history."""
    num_past = conv_size - 1
    for i in range(count):
        weights, at = (channel + i) * conv_size, past + (channel + i) * num_past
        newest = load(x, x_base + channel + i)
        total = newest * load(conv, weights + num_past)
        for j in range(num_past):
            total += load(history, at + j) * load(conv, weights + j)
        for j in range(num_past - 1):
            store(history, at + j, load(history, at + j + 1))
        store(history, at + num_past - 1, newest)
        y[y_base + i] = total
    for i in range(y_base, y_base + count):
        y[i] = _silu(y[i])


@inlined
def _normalize(x: Any, base: int, count: int, factor: float) -> None:
    total = float32(0)
    for i in range(base, base + count):
        total += x[i] * x[i]
    scale = factor / np.sqrt(total + float32(1e-6))
    for i in range(base, base + count):
        x[i] *= scale


@inlined
def _silu(x: Any) -> Any:
    return x / (float32(1) + np.exp(-x))


@inlined
def _softplus(x: Any) -> Any:
    return max(x, float32(0)) + np.log1p(np.exp(-abs(x)))
