"""Mixtures of experts on CUDA, for few tokens: every pair (token, expert) reads its own weights.

More tokens share them: grouped_experts.py. Neither knows on the host what was chosen, so grids are
as large as any choice needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.base import NormWeights, Routing
from nanovllm.kernels.fused import activate
from nanovllm.kernels.overlap import launch_options, wait_for_inputs

ROUTE_CHUNK = 32  # experts that all others are compared with at a time
GATE_UP_LINES = 2  # of the gate, and as many of the up, for a program
DOWN_ELEMENTS = 4096  # of the weight on its way to a program


def route(
    logits: Tensor,
    routing: Routing,
    counts: Tensor | None = None,
    x: Tensor | None = None,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and weights [tokens, top_k] of each token's experts, and the ranks of the pairs.

    A rank counts the pairs that have the same expert, in any order; they are added to counts.
    The norm of x, where it is given, is written to normed.
    """
    num_tokens, num_experts = logits.shape
    ids, ranks = torch.empty(2, num_tokens, routing.top_k, device=logits.device, dtype=torch.int32)
    weights = torch.empty(ids.shape, device=logits.device, dtype=torch.float32)
    block = triton.next_power_of_2(num_experts)
    dim = 1 if x is None else x.shape[1]
    if num_tokens == 0:
        return ids, weights, ranks
    _route[(num_tokens,)](
        *(ids, weights, logits, ranks, counts, normed, x),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        num_experts,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        TOP_K=routing.top_k,
        BLOCK=block,
        CHUNK=min(block, ROUTE_CHUNK),
        IS_NORMALIZED=routing.is_normalized,
        num_warps=4,
        **launch_options(logits, num_tokens),
    )
    return ids, weights, ranks


def run_pairs(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts; all tensors are contiguous."""
    num_tokens, top_k = ids.shape
    _, hidden, size = down.shape
    y = torch.empty(num_tokens * top_k, size, device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    options = launch_options(x, num_tokens)
    _pair_gate_up[(triton.cdiv(size, GATE_UP_LINES), len(y))](
        *(y, x, gate_up, ids, size),
        NUM_IN=hidden,
        TOP_K=top_k,
        LINES=GATE_UP_LINES,
        TILE=min(triton.next_power_of_2(hidden), 2048),
        num_warps=4,
        **options,
    )
    top_k_block = triton.next_power_of_2(top_k)
    tile = min(max(size & -size, 64), 128)  # wastes no lane
    lines = max(DOWN_ELEMENTS // (top_k_block * tile), 1)
    _pair_down[(triton.cdiv(hidden, lines), num_tokens)](
        *(out, y, down, ids, weights, hidden),
        NUM_IN=size,
        TOP_K=top_k,
        TOP_K_BLOCK=top_k_block,
        LINES=lines,
        TILE=tile,
        num_warps=8,
        **options,
    )
    return out


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    ids,
    weights,
    logits,
    ranks,
    counts,
    normed,
    x,
    norm_weight,
    eps,
    num_experts,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    first = token * TOP_K
    logits += token * num_experts
    dtype: tl.constexpr = logits.dtype.element_ty
    places = _choose(
        *(ids + first, weights + first, logits, num_experts),
        *(dtype, TOP_K, BLOCK, CHUNK, IS_NORMALIZED),
    )
    if counts is not None:
        is_chosen = places < TOP_K
        rank = tl.atomic_add(counts + tl.arange(0, BLOCK), 1, mask=is_chosen, sem="relaxed")
        tl.store(ranks + first + places, rank, mask=is_chosen)
    if normed is not None:
        i = tl.arange(0, DIM_BLOCK)
        values = tl.load(x + token * DIM + i, mask=i < DIM, other=0.0).to(tl.float32)
        factors = tl.load(norm_weight + i, mask=i < DIM, other=0.0)
        values = (values * tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)).to(dtype)
        tl.store(normed + token * DIM + i, (values * factors).to(dtype), mask=i < DIM)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    ids,
    weights,
    logits,
    num_experts,
    dtype: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    """Store ids and weights, rounded to dtype, of a token's experts; return every expert's place.

    Their order is by logit, then by index; how many are ahead of an expert is its place.
    """
    experts = tl.arange(0, BLOCK)
    values, keys = _load_keys(logits, experts, num_experts)
    places = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.static_range(0, BLOCK, CHUNK):
        others = begin + tl.arange(0, CHUNK)
        _, other_keys = _load_keys(logits, others, num_experts)
        is_ahead = other_keys[None, :] > keys[:, None]
        is_ahead |= (other_keys[None, :] == keys[:, None]) & (others[None, :] < experts[:, None])
        places += tl.sum(is_ahead.to(tl.int32), 1)
    is_chosen = places < TOP_K
    shares = tl.exp(values - tl.max(values, 0))
    total = tl.sum(tl.where(is_chosen, shares, 0.0) if IS_NORMALIZED else shares, 0)
    tl.store(ids + places, experts, mask=is_chosen)
    tl.store(weights + places, (shares / total).to(dtype).to(tl.float32), mask=is_chosen)
    return places


@triton.jit
def _load_keys(logits, experts, num_experts):  # type: ignore[no-untyped-def]
    """Return some logits and integers that are ordered like them; NaN is like a large number."""
    is_expert = experts < num_experts
    values = tl.load(
        logits + experts, mask=is_expert, other=-float("inf"), cache_modifier=".cg"
    ).to(tl.float32)
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # no negative zero
    return values, tl.where(is_expert, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(1 << 31))


@triton.jit
def _pair_gate_up(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    ids,
    num_out,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[pair] = silu(gate) * up."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    out = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_out = (out < num_out)[:, None]
    gates = weight + expert * 2 * num_out * NUM_IN + out[:, None] * NUM_IN
    ups = gates + num_out * NUM_IN
    gate_sums = tl.zeros((LINES, TILE), tl.float32)
    up_sums = tl.zeros((LINES, TILE), tl.float32)
    for begin in tl.range(0, NUM_IN, TILE, loop_unroll_factor=2):
        i = begin + tl.arange(0, TILE)
        is_in = i < NUM_IN
        mask = is_out & is_in[None, :]
        gate = tl.load(gates + i[None, :], mask=mask, other=0.0)
        up = tl.load(ups + i[None, :], mask=mask, other=0.0)
        values = tl.load(x + pair // TOP_K * NUM_IN + i, mask=is_in, other=0.0)
        values = values.to(tl.float32)[None, :]
        gate_sums += gate.to(tl.float32) * values
        up_sums += up.to(tl.float32) * values
    value = activate(tl.sum(gate_sums, 1), "silu") * tl.sum(up_sums, 1)
    tl.store(y + pair * num_out + out, value.to(y.dtype.element_ty), mask=out < num_out)


@triton.jit
def _pair_down(  # type: ignore[no-untyped-def]
    out,
    y,
    weight,
    ids,
    pair_weights,
    num_out,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile has the same lines of all the experts of a token, whose sum never leaves it."""
    token = tl.program_id(1)
    choices = tl.arange(0, TOP_K_BLOCK)
    is_choice = choices < TOP_K
    pairs = token * TOP_K + choices
    outs = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_line = (is_choice[:, None] & (outs < num_out)[None, :])[:, :, None]
    # The kernel before this one started after the choice was made: weights need not wait for it.
    expert = tl.load(ids + pairs, mask=is_choice, other=0, cache_modifier=".cg").to(tl.int64)
    places = weight + ((expert[:, None] * num_out + outs[None, :]) * NUM_IN)[:, :, None]
    lanes = tl.arange(0, TILE)
    tile = tl.load(places + lanes, mask=is_line & (lanes < NUM_IN), other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((TOP_K_BLOCK, LINES, TILE), tl.float32)
    for begin in tl.range(0, NUM_IN, TILE):
        i = begin + lanes
        after = i + TILE
        next_tile = tl.load(places + after, mask=is_line & (after < NUM_IN), other=0.0)
        mask = is_choice[:, None] & (i < NUM_IN)
        values = tl.load(y + pairs[:, None] * NUM_IN + i, mask=mask, other=0.0)
        sums += tile.to(tl.float32) * values.to(tl.float32)[:, None, :]
        tile = next_tile
    factors = tl.load(pair_weights + pairs, mask=is_choice, other=0.0)
    totals = tl.sum(tl.sum(sums, 2) * factors[:, None], 0)
    tl.store(out + token * num_out + outs, totals.to(out.dtype.element_ty), mask=outs < num_out)
