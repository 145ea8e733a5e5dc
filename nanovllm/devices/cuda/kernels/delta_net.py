"""Gated DeltaNet on CUDA; torch_delta_net.py defines what is computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.fp8_rows import MIN_DOT_SIZE
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import DeltaNetInputs, DeltaNetWeights, LayerState
from nanovllm.ops.torch_delta_net import EPS, Chunks

NORM_EPS = tl.constexpr(EPS)


def run_tokens(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState, slots: Tensor
) -> Tensor:
    """Run rows of one token: the convolution, then a CTA for each value head of a row."""
    _, num_heads, key_dim, value_dim = state.recurrent.shape
    num_rows, num_channels = inputs.qkv.shape
    conv_size = weights.conv.shape[1]
    options = launch_options(inputs.qkv, num_rows)
    # The outputs of the convolution are float32, because the delta rule does not round them.
    qkv = torch.empty(num_rows, num_channels, dtype=torch.float32, device=inputs.qkv.device)
    block = 256
    _convolve[(num_rows, triton.cdiv(num_channels, block))](
        *(qkv, inputs.qkv, weights.conv, state.conv, slots),
        *(num_channels, inputs.qkv.stride(0), state.conv.stride(0)),
        CONV_SIZE=conv_size,
        BLOCK=block,
        num_warps=4,
        **options,
    )
    output = torch.empty(num_rows, num_heads * value_dim, dtype=inputs.z.dtype, device=qkv.device)
    gates = inputs.z, inputs.b, inputs.a
    _delta_rule[(num_rows, num_heads)](
        *(output, qkv, *gates, weights.decay, weights.dt_bias, weights.norm.weight),
        *(weights.norm.eps, state.recurrent, slots, num_channels),
        *(gate.stride(0) for gate in gates),
        state.recurrent.stride(0),
        KEY_HEADS=(num_channels - num_heads * value_dim) // (2 * key_dim),
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        IS_TILED=weights.is_tiled,
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=8,
        **options,
    )
    return output


def scan_chunks(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run one chunk after another, with a CTA for some columns of each head's state."""
    num_rows, num_heads, num_chunks, size, value_dim = chunks.changes.shape
    key_dim, block_v = state.shape[2], MIN_DOT_SIZE.value
    output, after = state.new_empty(chunks.changes.shape), torch.empty_like(state)
    _scan_chunks[(num_rows * num_heads, triton.cdiv(value_dim, block_v))](
        *(output, after, state, *(part.contiguous() for part in chunks), num_chunks),
        SIZE=size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_T=max(triton.next_power_of_2(size), MIN_DOT_SIZE),
        BLOCK_K=max(triton.next_power_of_2(key_dim), MIN_DOT_SIZE),
        BLOCK_V=block_v,
        num_warps=4,
        num_stages=1,
    )
    return output, after


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    y,
    x,
    weights,
    history,
    slots,
    num_channels,
    x_stride,
    history_stride,
    CONV_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Set y to silu(conv(x)) for one token of each row, and move x into the row's history."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_channels
    past = history + tl.load(slots + row) * history_stride + i * (CONV_SIZE - 1)
    weights += i * CONV_SIZE
    wait_for_inputs(OVERLAP)
    newest = tl.load(x + row * x_stride + i, mask=mask, other=0.0)
    last_weight = tl.load(weights + CONV_SIZE - 1, mask=mask, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * last_weight
    for j in tl.static_range(CONV_SIZE - 1):
        value = tl.load(past + j, mask=mask, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + j, mask=mask, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(past + j - 1, value, mask=mask)
    tl.store(past + CONV_SIZE - 2, newest, mask=mask)
    tl.store(y + row * num_channels + i, total * tl.sigmoid(total), mask=mask)


@triton.jit
def _delta_rule(  # type: ignore[no-untyped-def]
    output,
    qkv,
    z,
    b,
    a,
    log_decay,
    dt_bias,
    norm,
    norm_eps,
    states,
    slots,
    num_channels,
    z_stride,
    b_stride,
    a_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update the state of a head, and compute its normalized and gated output."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = i < KEY_DIM, j < VALUE_DIM
    cells = tl.load(slots + row) * state_stride + (head * KEY_DIM + i[:, None]) * VALUE_DIM + j
    cells += states
    is_cell = is_key[:, None] & is_value
    # Steps are far apart, so the state and the weights can be read before the inputs.
    state = tl.load(cells, mask=is_cell, other=0.0)
    rate, bias = tl.load(log_decay + head), tl.load(dt_bias + head)
    scale = tl.load(norm + j, mask=is_value, other=0.0)
    wait_for_inputs(OVERLAP)
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    key = qkv + row * num_channels + key_head * KEY_DIM + i
    q = tl.load(key, mask=is_key, other=0.0)
    k = tl.load(key + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
    value = qkv + row * num_channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(value, mask=is_value, other=0.0)
    q *= tl.rsqrt((tl.sum(q * q) + NORM_EPS) * KEY_DIM)
    k *= tl.rsqrt(tl.sum(k * k) + NORM_EPS)
    dt = tl.load(a + row * a_stride + head).to(tl.float32) + bias
    # This is softplus: log(1 + exp(dt)). Near 0, log(1 + x) is computed as x times a quotient.
    exponential = tl.exp(-tl.abs(dt))
    rounded = 1.0 + exponential
    slope = tl.where(rounded == 1.0, 1.0, tl.log(rounded) / (rounded - 1.0))
    state *= tl.exp(rate * (tl.maximum(dt, 0.0) + exponential * slope))
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    change = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * change
    tl.store(cells, state, mask=is_cell)
    y = tl.sum(state * q[:, None], 0)
    y *= tl.rsqrt(tl.sum(y * y) / VALUE_DIM + norm_eps) * scale
    gate = tl.load(z + row * z_stride + head * VALUE_DIM + j, mask=is_value, other=0.0)
    gate = gate.to(tl.float32)
    y *= gate * tl.sigmoid(gate)
    target = output + (row * HEADS + head) * VALUE_DIM + j
    tl.store(target, y.to(output.dtype.element_ty), mask=is_value)


@triton.jit
def _scan_chunks(  # type: ignore[no-untyped-def]
    output,
    after,
    before,
    changes,
    reads,
    q,
    k,
    scores,
    decay,
    num_chunks,
    SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run all chunks of a head for some columns of its state, which stay in registers.

    A product of three TF32 multiplications each has nearly the precision of float32.
    """
    head = tl.program_id(0).to(tl.int64)
    t, i = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_cell = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)
    is_key = (t < SIZE)[:, None] & (i < KEY_DIM)
    is_value = (t < SIZE)[:, None] & (j < VALUE_DIM)
    is_score = (t < SIZE)[:, None] & (t < SIZE)
    cells = (head * KEY_DIM + i[:, None]) * VALUE_DIM + j
    state = tl.load(before + cells, mask=is_cell, other=0.0)
    for chunk in range(num_chunks):
        tokens = (head * num_chunks + chunk) * SIZE + t[:, None]
        keys, values = tokens * KEY_DIM + i, tokens * VALUE_DIM + j
        change = tl.load(changes + values, mask=is_value, other=0.0)
        read = tl.load(reads + keys, mask=is_key, other=0.0)
        change -= tl.dot(read, state, input_precision="tf32x3")
        query = tl.load(q + keys, mask=is_key, other=0.0)
        score = tl.load(scores + tokens * SIZE + t, mask=is_score, other=0.0)
        y = tl.dot(query, state, input_precision="tf32x3")
        y = tl.dot(score, change, y, input_precision="tf32x3")
        tl.store(output + values, y, mask=is_value)
        key = tl.load(k + keys, mask=is_key, other=0.0)
        state *= tl.load(decay + head * num_chunks + chunk)
        state = tl.dot(tl.trans(key), change, state, input_precision="tf32x3")
    tl.store(after + cells, state, mask=is_cell)
