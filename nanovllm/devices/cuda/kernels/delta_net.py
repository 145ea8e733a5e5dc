"""Gated DeltaNet for rows of one token; torch_delta_net.py is the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.delta_net_chunks import (
    CHANNELS,
    NORM_EPS,
    key_head_of,
    run_chunks,
    softplus,
)
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import DeltaNetInputs, DeltaNetWeights, LayerState, RecurrentRows


def gated_delta_net(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState, rows: RecurrentRows
) -> Tensor:
    """Implement Ops.gated_delta_net, in the chunked form if `rows.chunks` is set."""
    if rows.chunks is None:
        return run_tokens(inputs, weights, state, rows.slots)
    return run_chunks(inputs, weights, state, rows.chunks)


def run_tokens(
    inputs: DeltaNetInputs, weights: DeltaNetWeights, state: LayerState, slots: Tensor
) -> Tensor:
    """Run rows of one token: the convolution, then the delta rule of each value head."""
    _, num_heads, key_dim, value_dim = state.recurrent.shape
    num_rows, num_channels = inputs.qkv.shape
    conv_size = weights.conv.shape[1]
    options = launch_options(inputs.qkv, num_rows)
    # float32, because the reference does not round the outputs of the convolution either.
    qkv = torch.empty(num_rows, num_channels, dtype=torch.float32, device=inputs.qkv.device)
    _convolve[(num_rows, triton.cdiv(num_channels, CHANNELS))](
        *(qkv, inputs.qkv, weights.conv, state.conv, slots),
        *(num_channels, inputs.qkv.stride(0), state.conv.stride(0)),
        CONV_SIZE=conv_size,
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
        IS_TILED=weights.is_tiled,
        num_warps=4,
        **options,
    )
    return output


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
    OVERLAP: tl.constexpr,
):
    """Compute y = silu(conv(x)) for one token per row, and append x to the row's history."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = i < num_channels
    past = history + tl.load(slots + row) * history_stride + i * (CONV_SIZE - 1)
    weights += i * CONV_SIZE
    last_weight = tl.load(weights + CONV_SIZE - 1, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    # The previous step wrote the history, so it can be read and shifted before the wait.
    for j in tl.static_range(CONV_SIZE - 1):
        value = tl.load(past + j, mask=mask, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + j, mask=mask, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(past + j - 1, value, mask=mask)
    wait_for_inputs(OVERLAP)
    new = tl.load(x + row * x_stride + i, mask=mask, other=0.0)
    total += new.to(tl.float32) * last_weight
    tl.store(past + CONV_SIZE - 2, new, mask=mask)
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
    IS_TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update the state of a value head, and compute its normalized and gated output."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    is_key, is_value = i < KEY_DIM, j < VALUE_DIM
    cells = tl.load(slots + row) * state_stride + (head * KEY_DIM + i[:, None]) * VALUE_DIM + j
    cells += states
    is_cell = is_key[:, None] & is_value
    # The previous step wrote the state, so it can be read before the wait, like the weights.
    state = tl.load(cells, mask=is_cell, other=0.0)
    rate, bias = tl.load(log_decay + head), tl.load(dt_bias + head)
    scale = tl.load(norm + j, mask=is_value, other=0.0)
    wait_for_inputs(OVERLAP)
    key_head = key_head_of(head, KEY_HEADS, HEADS, IS_TILED)
    key = qkv + row * num_channels + key_head * KEY_DIM + i
    q = tl.load(key, mask=is_key, other=0.0)
    k = tl.load(key + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
    value = qkv + row * num_channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(value, mask=is_value, other=0.0)
    gate = tl.load(z + row * z_stride + head * VALUE_DIM + j, mask=is_value, other=0.0)
    gate = gate.to(tl.float32)
    dt = tl.load(a + row * a_stride + head).to(tl.float32) + bias
    decay = tl.exp(rate * softplus(dt))
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    # Reductions across warps take most of the time. So q and k are normalized after the products,
    # and q @ new state is computed as decay * (q @ state) + (q @ k) * change.
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_triples)
    q_state, k_state = tl.reduce((q[:, None] * state, k[:, None] * state), 0, _add_pairs)
    q_norm = tl.rsqrt((qq + NORM_EPS) * KEY_DIM)
    k_norm = tl.rsqrt(kk + NORM_EPS)
    # The change includes k_norm, because the k that it is multiplied by is not normalized.
    change = k_norm * beta * (v - decay * k_norm * k_state)
    tl.store(cells, decay * state + k[:, None] * change, mask=is_cell)
    y = q_norm * (decay * q_state + qk * change)
    y *= tl.rsqrt(tl.sum(y * y) / VALUE_DIM + norm_eps) * scale
    y *= gate * tl.sigmoid(gate)
    target = output + (row * HEADS + head) * VALUE_DIM + j
    tl.store(target, y.to(output.dtype.element_ty), mask=is_value)


@triton.jit
def _add_pairs(a0, a1, b0, b1):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1


@triton.jit
def _add_triples(a0, a1, a2, b0, b1, b2):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1, a2 + b2
