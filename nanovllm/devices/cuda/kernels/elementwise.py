"""Fused element-wise kernels for CUDA; torch_ops.py is the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.fp8_rows import (
    MIN_DOT_SIZE,
    hadamard_matrix,
    hadamard_transform,
    padded_range,
    quantize,
)
from nanovllm.devices.cuda.kernels.pdl import MAX_ROWS, launch_options, wait_for_inputs
from nanovllm.ops.fp8 import hadamard_exponents, hadamard_size
from nanovllm.ops.interface import (
    ACTIVATIONS,
    Activation,
    DequantScales,
    LayerCache,
    NormWeights,
    QKNormWeights,
    ResidualStream,
)

COLUMNS = tl.constexpr(1024)  # columns per CTA, if a row is split over several
GELU_LINEAR, GELU_CUBIC = (tl.constexpr(factor) for factor in ACTIVATIONS["gelu_tanh"])


def rms_norm(hidden: ResidualStream, norm: NormWeights, target: Tensor | None = None) -> Tensor:
    """Return RMSNorm(residual + update), and store the sum in the residual.

    With a `target`, add the result to it in place, and return the target.
    """
    residual, update = hidden.residual, hidden.update
    num_rows, dim = residual.shape
    out = torch.empty_like(residual) if target is None else target
    block = triton.next_power_of_2(dim)
    # Few rows are latency-bound; many are bandwidth-bound and need 16-byte accesses.
    per_thread = 4 if num_rows <= MAX_ROWS else 8
    _rms_norm[(num_rows,)](
        out,
        residual,
        update,
        scales_of(hidden.scales),
        norm.weight,
        norm.eps,
        dim,
        BLOCK=block,
        NUM_SPLITS=count_splits(update),
        ADDS=target is not None,
        num_warps=min(max(block // (32 * per_thread), 1), 8),
        **launch_options(residual, num_rows),
    )
    return out


def count_splits(update: Tensor | None) -> int:
    """Return the number of partial sums of an update; 0 if there is no update."""
    if update is None:
        return 0
    return len(update) if update.dim() == 3 else 1


def scales_of(scales: DequantScales | None) -> tuple[Tensor, Tensor] | None:
    return None if scales is None else (scales.rows, scales.outputs)


def act_and_mul(
    gate_up: Tensor, activation: Activation, scales: DequantScales | None = None
) -> Tensor:
    """Implement Ops.act_and_mul; unscaled FP8 GEMM outputs are first multiplied by `scales`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, device=gate_up.device, dtype=gate_up.dtype)
    _gate[(num_rows, triton.cdiv(size, COLUMNS))](
        out,
        gate_up,
        scales_of(scales),
        size,
        ACTIVATION=activation,
        num_warps=4,
        **launch_options(gate_up, num_rows),
    )
    return out


def multiply_sigmoid(x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
    """Implement Ops.multiply_sigmoid in place."""
    num_rows, size = x.shape
    _multiply_sigmoid[(num_rows, triton.cdiv(size, COLUMNS))](
        x,
        gate,
        base,
        size,
        gate.stride(0),
        IS_SINGLE=gate.shape[1] == 1,
        num_warps=4,
        **launch_options(x, num_rows),
    )
    return x


def rope_write(
    qkv: Tensor,
    norm: QKNormWeights | None,
    rope: Tensor,
    positions: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> None:
    """Implement Ops.rope_write; padding tokens have a negative slot_mapping and are not cached."""
    num_tokens, num_heads, head_dim = qkv.shape
    block_size, num_kv_heads = cache.k.shape[1:3]
    _rope_write[(num_tokens, 2)](
        qkv,
        None if norm is None else (norm.q, norm.k, norm.eps),
        rope,
        positions,
        tuple(cache.parts),
        slot_mapping,
        qkv.stride(0),
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_Q_ROPE=rope.shape[1] == 4,
        NORMS_ALL=norm is not None and norm.is_over_all_heads,
        HADAMARD=(
            hadamard_size(head_dim),
            *(2.0**exponent for exponent in hadamard_exponents(head_dim)),
        ),
        num_warps=4,
        **launch_options(qkv, num_tokens),
    )


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    out,
    residual,
    update,
    scales,
    weight,
    eps,
    dim,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    normed = add_and_norm(residual, update, scales, weight, eps, i, dim, NUM_SPLITS, OVERLAP)
    row = out + tl.program_id(0).to(tl.int64) * dim + i
    if ADDS:
        normed = normed.to(tl.float32) + tl.load(row, mask=i < dim, other=0.0).to(tl.float32)
    tl.store(row, normed, mask=i < dim)


@triton.jit
def add_and_norm(  # type: ignore[no-untyped-def]
    residual, update, scales, weight, eps, i, dim, NUM_SPLITS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Add the update to this CTA's row of the residual, store the sum, and return its RMSNorm.

    `i` holds all column indices, in any order and shape. NUM_SPLITS is the number of partial sums
    of the update; 0 means that there is no update.
    """
    base = tl.program_id(0).to(tl.int64) * dim
    mask = i < dim
    factor = tl.load(weight + i, mask=mask, other=0.0)
    if scales is not None:
        column_scales = tl.load(scales[1] + i, mask=mask, other=0.0)
    wait_for_inputs(OVERLAP)
    value = tl.load(residual + base + i, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 0:
        added = tl.load(update + base + i, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, NUM_SPLITS):
            partial_sum = update + split * tl.num_programs(0) * dim + base
            added += tl.load(partial_sum + i, mask=mask, other=0.0)
        if scales is not None:
            added *= tl.load(scales[0] + tl.program_id(0)) * column_scales
        total = (added + value).to(residual.dtype.element_ty)
        tl.store(residual + base + i, total, mask=mask)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / dim + eps)
    normed = (value * scale).to(residual.dtype.element_ty)
    return (normed * factor).to(residual.dtype.element_ty)


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    out,
    gate_up,
    scales,
    size,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = i < size
    gate = tl.load(gate_up + 2 * row * size + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * size + i, mask=mask, other=0.0)
    if scales is None:
        active = activate(gate, ACTIVATION).to(out.dtype.element_ty)
        tl.store(out + row * size + i, active * up, mask=mask)
    else:
        row_scale = tl.load(scales[0] + row)
        gate *= row_scale * tl.load(scales[1] + i, mask=mask, other=0.0)
        up_scale = row_scale * tl.load(scales[1] + size + i, mask=mask, other=0.0)
        product = activate(gate, ACTIVATION) * (up.to(tl.float32) * up_scale)
        tl.store(out + row * size + i, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply_sigmoid(  # type: ignore[no-untyped-def]
    x,
    gate,
    base,
    size,
    gate_stride,
    IS_SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = i < size
    column = 0 * i if IS_SINGLE else i
    factor = tl.sigmoid(tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32))
    value = tl.load(x + row * size + i, mask=mask).to(tl.float32) * factor
    if base is not None:
        value += tl.load(base + row * size + i, mask=mask).to(tl.float32)
    tl.store(x + row * size + i, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply SiLU or GELU (tanh): both are the input times a sigmoid."""
    exponent = gate
    if ACTIVATION == "gelu_tanh":
        exponent = gate * (GELU_LINEAR + GELU_CUBIC * gate * gate)
    return gate / (1.0 + tl.exp(-exponent))


# The slot_mapping is one row of a table with a row per group: its alignment varies.
@triton.jit(do_not_specialize_on_alignment=("slot_mapping",))
def _rope_write(  # type: ignore[no-untyped-def]
    qkv,
    norm,
    rope,
    positions,
    caches,
    slot_mapping,
    token_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q_ROPE: tl.constexpr,
    NORMS_ALL: tl.constexpr,
    HADAMARD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Apply the norm, if any, and RoPE to queries and keys; the grid is (tokens, 2).

    One CTA updates the queries of a token in place. The other updates its keys, and stores keys and
    values in the cache. With an FP8 cache, queries and keys are also Hadamard-transformed.
    """
    token = tl.program_id(0).to(tl.int64)
    base = token * token_stride
    half: tl.constexpr = HEAD_DIM // 2
    least: tl.constexpr = 1 if len(caches) == 2 else MIN_DOT_SIZE
    i = padded_range(half, least)
    kv_heads = padded_range(NUM_KV_HEADS, least)
    position = tl.load(positions + token).to(tl.int64)
    if HAS_Q_ROPE:  # a position has two rows of cosines and sines: for k, then for q
        position = 2 * position + 1 - tl.program_id(1)
    angles = rope + position * HEAD_DIM + i
    cos = tl.load(angles, mask=i < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=i < half, other=0.0)[None, :]
    cache_slot = tl.load(slot_mapping + token + 0 * kv_heads).to(tl.int64)[:, None]
    matrix = ()
    if len(caches) > 2:
        matrix = hadamard_matrix(i.shape[0], HADAMARD[0], qkv.dtype.element_ty)
    wait_for_inputs(OVERLAP)
    if tl.program_id(1) == 0:
        heads = padded_range(NUM_Q_HEADS, least)[:, None]
        q = qkv + base + heads * HEAD_DIM + i[None, :]
        mask = (heads < NUM_Q_HEADS) & (i < half)[None, :]
        first, second = _rotate(
            *(q, mask, norm, 0, heads, NUM_Q_HEADS if NORMS_ALL else 1, cos, sin, i, half)
        )
        if len(caches) > 2:
            first, second = hadamard_transform(first, second, matrix, HADAMARD[1])
        tl.store(q, first, mask=mask)
        tl.store(q + half, second, mask=mask)
    else:
        # Triton requires that a name has the same type in both branches, so these names differ.
        kv = qkv + base + NUM_Q_HEADS * HEAD_DIM
        kv_head = kv_heads[:, None]
        is_kv = (kv_head < NUM_KV_HEADS) & (i < half)[None, :]
        offsets = kv_head * HEAD_DIM + i[None, :]
        k_first, k_second = _rotate(
            *(kv + offsets, is_kv, norm, 1, kv_head),
            *(NUM_KV_HEADS if NORMS_ALL else 1, cos, sin, i, half),
        )
        cached = cache_slot * NUM_KV_HEADS * HEAD_DIM + offsets
        is_cached = is_kv & (cache_slot >= 0)
        v = kv + NUM_KV_HEADS * HEAD_DIM + offsets
        v_first = tl.load(v, mask=is_kv, other=0.0)
        v_second = tl.load(v + half, mask=is_kv, other=0.0)
        if len(caches) > 2:
            row = cache_slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head
            offset = row * BLOCK_SIZE + cache_slot % BLOCK_SIZE  # [heads, 1]
            is_row = (kv_head < NUM_KV_HEADS) & (cache_slot >= 0)
            k_first, k_second = hadamard_transform(k_first, k_second, matrix, HADAMARD[2])
            k_first, k_second = quantize(k_first, k_second, caches[2] + offset, is_row)
            v_first, v_second = quantize(v_first, v_second, caches[3] + offset, is_row)
        tl.store(caches[0] + cached, k_first, mask=is_cached)
        tl.store(caches[0] + cached + half, k_second, mask=is_cached)
        tl.store(caches[1] + cached, v_first, mask=is_cached)
        tl.store(caches[1] + cached + half, v_second, mask=is_cached)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x,
    mask,
    norm,
    INDEX: tl.constexpr,
    heads,
    NUM_NORMED: tl.constexpr,
    cos,
    sin,
    i,
    half: tl.constexpr,
):
    """Load heads, apply the norm, if any, then RoPE, and return both halves.

    INDEX selects the norm's weight: 0 for q, 1 for k. NUM_NORMED is the number of heads that are
    normalized together: one, or all.
    """
    dtype = x.dtype.element_ty
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        weight, is_weight = norm[INDEX] + i[None, :], (i < half)[None, :]
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if NUM_NORMED > 1:
            weight, is_weight = weight + heads * (2 * half), mask
            total = tl.zeros_like(total) + tl.sum(total, 0)
        scale = tl.rsqrt(total / (NUM_NORMED * 2 * half) + norm[2])[:, None]
        first_weight = tl.load(weight, mask=is_weight, other=0.0)
        second_weight = tl.load(weight + half, mask=is_weight, other=0.0)
        first = ((first * scale).to(dtype) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype) * second_weight).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
