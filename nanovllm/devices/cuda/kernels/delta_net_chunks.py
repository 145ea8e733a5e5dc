"""Gated DeltaNet in the chunked form; torch_delta_net.py is the reference.

Five kernels run all chunks of all rows: the convolution, the update of its state, the triangular
systems of the chunks, the scan from chunk to chunk, and the outputs. Only the scan is sequential.
Its matrix operands, and the state before each chunk, are stored in the dtype of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.fp8_rows import padded_range
from nanovllm.ops.interface import DeltaNetInputs, DeltaNetWeights, LayerState
from nanovllm.ops.torch_delta_net import CHUNK_SIZE, EPS

NORM_EPS = tl.constexpr(EPS)
SIZE = tl.constexpr(CHUNK_SIZE)
NUM_LEVELS = tl.constexpr(CHUNK_SIZE.bit_length() - 1)
CHANNELS = tl.constexpr(256)  # channels per CTA, if a CTA does not process a head
# Minimum padded key_dim and value_dim: Triton 3.6 computes wrong products of narrow 16-bit blocks.
MIN_BLOCK = tl.constexpr(64)
COLUMNS = tl.constexpr(64)  # maximum columns of a state that a CTA of the scan keeps in registers


def run_chunks(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    state: LayerState,
    chunks: Tensor,
) -> Tensor:
    """Run rows of any length; `chunks` is the result of `split_chunks`, plus any padding."""
    _, num_heads, key_dim, value_dim = state.recurrent.shape
    (num_tokens, num_channels), num_chunks = inputs.qkv.shape, len(chunks)
    num_key_heads = (num_channels - num_heads * value_dim) // (2 * key_dim)
    new = inputs.qkv.new_empty
    dims: dict[str, Any] = {
        "KEY_HEADS": num_key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }
    qkv = _convolve(inputs.qkv, weights, state, chunks, dims)
    sizes = dims | {"HEADS": num_heads, "IS_TILED": weights.is_tiled}
    changes = new(num_tokens, num_heads, value_dim)
    reads = new(num_tokens, num_heads, key_dim)
    totals = new(num_tokens, num_heads, dtype=torch.float32)
    _solve_chunks[(num_chunks, num_heads)](
        *(changes, reads, totals, qkv, inputs.b, inputs.a, weights.decay, weights.dt_bias),
        *(chunks, inputs.b.stride(0), inputs.a.stride(0)),
        **sizes,
        num_warps=4,
    )
    before = new(num_chunks, num_heads, key_dim, value_dim)
    _scan_chunks[(num_chunks, num_heads, triton.cdiv(value_dim, COLUMNS))](
        *(changes, before, state.recurrent, qkv, reads, totals, chunks),
        state.recurrent.stride(0),
        **sizes,
        num_warps=4,
        num_stages=1,  # more stages leave fewer CTAs per SM
    )
    output = new(inputs.z.shape)
    _compute_outputs[(num_chunks, num_heads)](
        *(output, qkv, changes, before, totals, inputs.z, weights.norm.weight),
        *(chunks, weights.norm.eps, inputs.z.stride(0)),
        **sizes,
        num_warps=8 if qkv.dtype == torch.float32 else 4,
    )
    return output


def _convolve(
    x: Tensor,
    weights: DeltaNetWeights,
    state: LayerState,
    chunks: Tensor,
    dims: dict[str, int],
) -> Tensor:
    """Return silu(conv(x)), with q and k normalized, and update the states of the convolution."""
    (num_tokens, num_channels), conv_size = x.shape, weights.conv.shape[1]
    y = x.new_empty(num_tokens, num_channels)
    num_heads = 2 * dims["KEY_HEADS"] + state.recurrent.shape[1]
    _convolve_chunks[(len(chunks), num_heads)](
        *(y, x, weights.conv, state.conv, chunks),
        *(num_channels, x.stride(0), state.conv.stride(0)),
        **dims,
        CONV_SIZE=conv_size,
        num_warps=4,
    )
    _update_conv_states[(len(chunks), triton.cdiv(num_channels, CHANNELS))](
        *(state.conv, x, chunks, num_channels, x.stride(0), state.conv.stride(0)),
        CONV_SIZE=conv_size,
        num_warps=4,
    )
    return y


@triton.jit
def _load_chunk(chunks, index):  # type: ignore[no-untyped-def]
    """Return a chunk's slot, its first token, and its row's tokens before it and from it on."""
    chunk = chunks + 4 * index
    slot, first = tl.load(chunk).to(tl.int64), tl.load(chunk + 1).to(tl.int64)
    return slot, first, tl.load(chunk + 2), tl.load(chunk + 3)


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply in DTYPE; for float32, three TF32 products are nearly as precise."""
    if tl.float32 == DTYPE:
        return tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a.to(DTYPE), b.to(DTYPE))


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, IS_TILED: tl.constexpr):  # type: ignore[no-untyped-def]
    return head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)


@triton.jit(do_not_specialize_on_alignment=("chunks",))
def _convolve_chunks(  # type: ignore[no-untyped-def]
    y,
    x,
    weights,
    history,
    chunks,
    num_channels,
    x_stride,
    history_stride,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_SIZE: tl.constexpr,
):
    """Compute the convolution of a chunk for one head of q, k or v; normalize q and k."""
    index, head = tl.program_id(0), tl.program_id(1)
    slot, first, num_before, num_left = _load_chunk(chunks, index)
    if num_left == 0:  # padding
        return
    is_key = head < 2 * KEY_HEADS
    size = tl.where(is_key, KEY_DIM, VALUE_DIM)
    num_keys: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    begin = tl.where(is_key, head * KEY_DIM, num_keys + (head - 2 * KEY_HEADS) * VALUE_DIM)
    t, i = tl.arange(0, SIZE), padded_range(KEY_DIM, triton.next_power_of_2(VALUE_DIM))
    is_token, is_channel = t < num_left, i < size
    channel = begin + i
    past = history + slot * history_stride + channel * (CONV_SIZE - 1)
    total = tl.zeros((SIZE, i.shape[0]), tl.float32)
    for j in tl.static_range(CONV_SIZE):
        source = t + (j - CONV_SIZE + 1)  # relative to the first token of the chunk
        is_new = source + num_before >= 0
        new = tl.load(
            x + (first + source)[:, None] * x_stride + channel,
            mask=(is_token & is_new)[:, None] & is_channel,
            other=0.0,
        )
        old = tl.load(
            past + (source + num_before + CONV_SIZE - 1)[:, None],
            mask=(is_token & ~is_new)[:, None] & is_channel,
            other=0.0,
        )
        weight = tl.load(weights + channel * CONV_SIZE + j, mask=is_channel, other=0.0)
        total += (new + old).to(tl.float32) * weight.to(tl.float32)
    total *= tl.sigmoid(total)
    norm = tl.rsqrt(tl.sum(total * total, 1) + NORM_EPS)
    norm *= tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    total *= tl.where(is_key, norm, 1.0)[:, None]
    target = y + (first + t)[:, None] * num_channels + channel
    tl.store(target, total.to(y.dtype.element_ty), mask=is_token[:, None] & is_channel)


@triton.jit(do_not_specialize_on_alignment=("chunks",))
def _update_conv_states(  # type: ignore[no-untyped-def]
    history,
    x,
    chunks,
    num_channels,
    x_stride,
    history_stride,
    CONV_SIZE: tl.constexpr,
):
    """Store the last inputs of a row as the state of its convolution."""
    slot, first, num_before, num_tokens = _load_chunk(chunks, tl.program_id(0))
    if (num_before > 0) | (num_tokens == 0):  # not the row's first chunk, or padding
        return
    i = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = i < num_channels
    past = history + slot * history_stride + i * (CONV_SIZE - 1)
    for j in tl.static_range(CONV_SIZE - 1):
        source = num_tokens - (CONV_SIZE - 1) + j
        new = tl.load(x + (first + source) * x_stride + i, mask=mask & (source >= 0), other=0.0)
        # If the row is shorter than the state, older inputs move to the front.
        old = tl.load(past + num_tokens + j, mask=mask & (source < 0), other=0.0)
        tl.store(past + j, new + old, mask=mask)


@triton.jit(do_not_specialize_on_alignment=("chunks",))
def _solve_chunks(  # type: ignore[no-untyped-def]
    changes,
    reads,
    totals,
    qkv,
    b,
    a,
    log_decay,
    dt_bias,
    chunks,
    b_stride,
    a_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
):
    """Solve the triangular system of a chunk and head; torch_delta_net.py defines its results."""
    index, head = tl.program_id(0), tl.program_id(1)
    _, first, _, num_left = _load_chunk(chunks, index)
    if num_left == 0:  # padding
        return
    t = tl.arange(0, SIZE)
    i, j = padded_range(KEY_DIM, MIN_BLOCK), padded_range(VALUE_DIM, MIN_BLOCK)
    is_token = t < num_left
    is_key, is_value = is_token[:, None] & (i < KEY_DIM), is_token[:, None] & (j < VALUE_DIM)
    tokens = first + t
    rate, bias = tl.load(log_decay + head), tl.load(dt_bias + head)
    dt = tl.load(a + tokens * a_stride + head, mask=is_token, other=0.0).to(tl.float32) + bias
    decay = rate * softplus(dt)
    total = tl.cumsum(tl.where(is_token, decay, 0.0), 0)
    tl.store(totals + tokens * HEADS + head, total, mask=is_token)
    beta = tl.load(b + tokens * b_stride + head, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.sigmoid(beta)
    num_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    row = qkv + tokens[:, None] * (2 * num_keys + HEADS * VALUE_DIM) + num_keys
    key_head = key_head_of(head, KEY_HEADS, HEADS, IS_TILED)
    k = tl.load(row + key_head * KEY_DIM + i, mask=is_key, other=0.0)
    v = tl.load(row + num_keys + head * VALUE_DIM + j, mask=is_value, other=0.0)
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    is_later = t[:, None] > t
    between = tl.exp(tl.where(is_later, total[:, None] - total, 0.0))
    system = tl.where(is_later, _dot(k, tl.trans(k), DTYPE) * between * beta[:, None], 0.0)
    # Invert the unit triangular matrix by joining the inverses of its diagonal blocks in pairs.
    inverse = tl.where(t[:, None] == t, 1.0, 0.0) - tl.where(_is_pair(t, 0), system, 0.0)
    for level in tl.static_range(1, NUM_LEVELS):
        if num_left > 1 << level:
            joining = tl.where(_is_pair(t, level), system, 0.0)
            inverse -= _dot(_dot(inverse, joining, tl.float32), inverse, tl.float32)
    change = _dot(inverse, v.to(tl.float32) * beta[:, None], DTYPE)
    read = _dot(inverse, k.to(tl.float32) * (beta * tl.exp(total))[:, None], DTYPE)
    heads = tokens[:, None] * HEADS + head
    tl.store(changes + heads * VALUE_DIM + j, change.to(DTYPE), mask=is_value)
    tl.store(reads + heads * KEY_DIM + i, read.to(DTYPE), mask=is_key)


@triton.jit
def _is_pair(t, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a mask of the lower left block of each pair of diagonal blocks of size 2**LEVEL."""
    i, j = t[:, None] >> LEVEL, t[None, :] >> LEVEL
    return (i == j + 1) & (i % 2 == 1)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    # log(1 + exp(x)) is max(x, 0) + log(1 + y), where y = exp(-|x|). With u = 1 + y, rounded,
    # y * log(u) / (u - 1) computes log(1 + y) precisely even if y is small.
    exponential = tl.exp(-tl.abs(x))
    rounded = 1.0 + exponential
    slope = tl.where(rounded == 1.0, 1.0, tl.log(rounded) / (rounded - 1.0))
    return tl.maximum(x, 0.0) + exponential * slope


@triton.jit(do_not_specialize_on_alignment=("chunks",))
def _scan_chunks(  # type: ignore[no-untyped-def]
    changes,
    before,
    states,
    qkv,
    reads,
    totals,
    chunks,
    state_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
):
    """Run all chunks of a row for some columns of a head's state, which stay in registers.

    Store the state before each chunk, and subtract reads @ state from the changes.
    """
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, first, num_before, num_tokens = _load_chunk(chunks, index)
    if (num_before > 0) | (num_tokens == 0):  # not the row's first chunk, or padding
        return
    t, i = tl.arange(0, SIZE), padded_range(KEY_DIM, MIN_BLOCK)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_cell = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    num_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    num_channels: tl.constexpr = 2 * num_keys + HEADS * VALUE_DIM
    keys = qkv + num_keys + key_head_of(head, KEY_HEADS, HEADS, IS_TILED) * KEY_DIM + i
    cells = (head * KEY_DIM + i[:, None]) * VALUE_DIM + j
    own = states + slot * state_stride + cells
    state = tl.load(own, mask=is_cell, other=0.0)
    for begin in range(0, num_tokens, SIZE):
        is_token = begin + t < num_tokens
        is_key = is_token[:, None] & (i < KEY_DIM)
        is_value = is_token[:, None] & (j < VALUE_DIM)
        tokens = first + begin + t
        heads = tokens * HEADS + head
        last = first + tl.minimum(begin + SIZE, num_tokens) - 1
        read = tl.load(reads + heads[:, None] * KEY_DIM + i, mask=is_key, other=0.0)
        change = tl.load(changes + heads[:, None] * VALUE_DIM + j, mask=is_value, other=0.0)
        k = tl.load(keys + tokens[:, None] * num_channels, mask=is_key, other=0.0)
        total = tl.load(totals + heads, mask=is_token, other=0.0)
        end = tl.load(totals + last * HEADS + head)
        target = before + (index + begin // SIZE) * (HEADS * KEY_DIM * VALUE_DIM) + cells
        tl.store(target, state.to(DTYPE), mask=is_cell)
        change = change.to(tl.float32) - _dot(read, state, DTYPE)
        target = changes + heads[:, None] * VALUE_DIM + j
        tl.store(target, change.to(DTYPE), mask=is_value)
        k = k.to(tl.float32) * tl.exp(end - total)[:, None]
        state = state * tl.exp(end) + _dot(tl.trans(k), change, DTYPE)
    tl.store(own, state, mask=is_cell)


@triton.jit(do_not_specialize_on_alignment=("chunks",))
def _compute_outputs(  # type: ignore[no-untyped-def]
    output,
    qkv,
    changes,
    before,
    totals,
    z,
    norm,
    chunks,
    norm_eps,
    z_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
):
    """Compute the normalized and gated output of a chunk and head."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, first, _, num_left = _load_chunk(chunks, index)
    if num_left == 0:  # padding
        return
    t = tl.arange(0, SIZE)
    i, j = padded_range(KEY_DIM, MIN_BLOCK), padded_range(VALUE_DIM, MIN_BLOCK)
    is_token = t < num_left
    is_key, is_value = is_token[:, None] & (i < KEY_DIM), is_token[:, None] & (j < VALUE_DIM)
    tokens = first + t
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    num_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    row = qkv + tokens[:, None] * (2 * num_keys + HEADS * VALUE_DIM)
    row += key_head_of(head, KEY_HEADS, HEADS, IS_TILED) * KEY_DIM + i
    q = tl.load(row, mask=is_key, other=0.0)
    k = tl.load(row + num_keys, mask=is_key, other=0.0)
    heads = tokens * HEADS + head
    total = tl.load(totals + heads, mask=is_token, other=0.0)
    cells = before + ((index * HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j
    state = tl.load(cells, mask=(i < KEY_DIM)[:, None] & (j < VALUE_DIM), other=0.0)
    change = tl.load(changes + heads[:, None] * VALUE_DIM + j, mask=is_value, other=0.0)
    is_seen = is_token[:, None] & (t[:, None] >= t)
    between = tl.exp(tl.where(is_seen, total[:, None] - total, 0.0))
    scores = tl.where(is_seen, _dot(q, tl.trans(k), DTYPE) * between, 0.0)
    y = _dot(q, state, DTYPE) * tl.exp(total)[:, None] + _dot(scores, change, DTYPE)
    scale = tl.load(norm + j, mask=j < VALUE_DIM, other=0.0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + norm_eps)[:, None] * scale
    gate = tl.load(z + tokens[:, None] * z_stride + head * VALUE_DIM + j, mask=is_value, other=0.0)
    gate = gate.to(tl.float32)
    y *= gate * tl.sigmoid(gate)
    tl.store(output + heads[:, None] * VALUE_DIM + j, y.to(output.dtype.element_ty), mask=is_value)
