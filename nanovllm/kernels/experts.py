"""Mixtures of experts on CUDA, for few tokens: every pair (token, expert) reads its own weights.

More tokens share them: grouped_experts.py. Neither knows on the host what was chosen, so grids are
as large as any choice needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.base import NormWeights, Routing
from nanovllm.kernels.fused import activate
from nanovllm.kernels.overlap import launch_options, prefetch_share, wait_for_inputs
from nanovllm.kernels.skinny_linear import add_residual

PREFETCHED_BYTES = 32 << 20  # of the weights that come next: what L2 holds beside the current ones
TILE_ELEMENTS = 4096  # of the weight on its way to one program of 4 warps


@dataclass(frozen=True, slots=True)
class RoutedRow:
    normed: Tensor
    total: Tensor  # x + residual
    ids: Tensor  # [1, top_k]
    weights: Tensor


def route(
    logits: Tensor, routing: Routing, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and weights [tokens, top_k] of each token's experts, and the ranks of the pairs.

    A rank counts the pairs that have the same expert, in any order; they are added to counts.
    """
    num_tokens, num_experts = logits.shape
    shape = num_tokens, routing.top_k
    ids, ranks = torch.empty(2, *shape, device=logits.device, dtype=torch.int32)
    weights = torch.empty(shape, device=logits.device, dtype=torch.float32)
    block = triton.next_power_of_2(num_experts)
    if num_tokens > 0:
        _route[(num_tokens,)](
            ids,
            ranks,
            weights,
            logits,
            counts,
            num_experts,
            TOP_K=routing.top_k,
            TOP_K_BLOCK=triton.next_power_of_2(routing.top_k),
            BLOCK=block,
            IS_NORMALIZED=routing.is_normalized,
            num_warps=1 if block <= 256 else 4,
            **launch_options(logits, num_tokens),
        )
    return ids, weights, ranks


def route_row(
    x: Tensor,
    residual: Tensor | None,
    norm: NormWeights,
    router: Tensor,
    routing: Routing,
    counter: Tensor,  # int32 [1], zero before and after
) -> RoutedRow:
    """Norm one row, multiply it with the router's weight and choose, all in one kernel."""
    num_experts, num_in = router.shape
    top_k, block = routing.top_k, triton.next_power_of_2(num_experts)
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    logits = torch.empty(num_experts, device=x.device, dtype=torch.float32)
    ids = torch.empty(1, top_k, device=x.device, dtype=torch.int32)
    weights = torch.empty(1, top_k, device=x.device, dtype=torch.float32)
    _route_row[(triton.cdiv(num_experts, 2),)](
        normed,
        total,
        logits,
        ids,
        weights,
        counter,
        x,
        x if residual is None else residual,
        router,
        norm.weight,
        norm.eps,
        num_experts,
        NUM_IN=num_in,
        BLOCK_IN=min(triton.next_power_of_2(num_in), 2048),
        BLOCK_OUT=2,
        HAS_RESIDUAL=residual is not None,
        TOP_K=top_k,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=block,
        IS_NORMALIZED=routing.is_normalized,
        num_warps=4,
        **launch_options(x, 1),
    )
    return RoutedRow(normed, total, ids, weights)


def run_pairs(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts; all tensors are contiguous."""
    num_tokens, top_k = ids.shape
    _, hidden, size = down.shape
    num_pairs = num_tokens * top_k
    y = torch.empty(num_pairs, size, device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    options = launch_options(x, num_tokens)
    block_in = min(triton.next_power_of_2(hidden), TILE_ELEMENTS // 2)
    block_out = TILE_ELEMENTS // block_in
    num_programs = triton.cdiv(size, block_out)
    expert_bytes = hidden * size * down.itemsize
    is_prefetched = options["OVERLAP"] and num_pairs * expert_bytes <= PREFETCHED_BYTES
    _pair_gate_up[(num_programs, num_pairs)](
        y,
        x,
        gate_up,
        ids,
        down if is_prefetched and expert_bytes % 16 == 0 else None,
        triton.cdiv(expert_bytes, num_programs * 16) * 16,
        size,
        NUM_IN=hidden,
        TOP_K=top_k,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        **options,
    )
    top_k_block = triton.next_power_of_2(top_k)
    block_in = min(max(size & -size, 64), TILE_ELEMENTS // top_k_block)  # wastes no lane
    block_out = max(TILE_ELEMENTS // (top_k_block * block_in), 1)
    _pair_down[(triton.cdiv(hidden, block_out), num_tokens)](
        out,
        y,
        down,
        ids,
        weights,
        hidden,
        NUM_IN=size,
        TOP_K=top_k,
        TOP_K_BLOCK=top_k_block,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        **options,
    )
    return out


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    ids,
    ranks,
    weights,
    logits,
    counts,
    num_experts,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_expert = experts < num_experts
    values = tl.load(logits + token * num_experts + experts, mask=is_expert, other=-float("inf"))
    chosen_ids, is_slot = _choose(
        *(ids + token * TOP_K, weights + token * TOP_K, values.to(tl.float32), is_expert),
        *(logits.dtype.element_ty, TOP_K, TOP_K_BLOCK, IS_NORMALIZED),
    )
    if counts is not None:
        rank = tl.atomic_add(counts + chosen_ids, 1, mask=is_slot, sem="relaxed")
        tl.store(ranks + token * TOP_K + tl.arange(0, TOP_K_BLOCK), rank, mask=is_slot)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    ids,
    weights,
    values,
    is_expert,
    dtype: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    """Store ids and weights, rounded to dtype, of a token's experts; return the ids, and a mask.

    Keys order experts by logit, then by index, and hold both; NaN is a large number to them.
    """
    experts = tl.arange(0, values.shape[0])
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # no negative zero
    keys = (_ordered(bits).to(tl.int64) << 32) - experts
    keys = tl.where(is_expert, keys, -(1 << 63))
    slots = tl.arange(0, TOP_K_BLOCK)
    chosen = tl.zeros((TOP_K_BLOCK,), tl.int64)
    for slot in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(slots == slot, best, chosen)
        keys = tl.where(keys == best, -(1 << 63), keys)
    chosen_ids = (-chosen & 0xFFFFFFFF).to(tl.int32)
    bits = ((chosen + chosen_ids) >> 32).to(tl.int32)
    chosen_values = _ordered(bits).to(tl.float32, bitcast=True)
    is_slot = slots < TOP_K
    largest = tl.max(values, 0)
    shares = tl.where(is_slot, tl.exp(chosen_values - largest), 0.0)
    total = tl.sum(shares, 0) if IS_NORMALIZED else tl.sum(tl.exp(values - largest), 0)
    tl.store(ids + slots, chosen_ids, mask=is_slot)
    tl.store(weights + slots, (shares / total).to(dtype).to(tl.float32), mask=is_slot)
    return chosen_ids, is_slot


@triton.jit
def _route_row(  # type: ignore[no-untyped-def]
    normed,
    total_out,
    logits,
    ids,
    weights,
    counter,
    x,
    residual,
    router,
    norm_weight,
    eps,
    num_experts,
    NUM_IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As _skinny for some of the logits; the program that ends last chooses among all of them."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < num_experts
    lines = router + out[:, None] * NUM_IN
    lanes = tl.arange(0, BLOCK_IN)
    tile = tl.load(lines + lanes, mask=is_out[:, None] & (lanes < NUM_IN)[None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    squares = tl.zeros((1,), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + lanes
        after = i + BLOCK_IN
        mask = is_out[:, None] & (after < NUM_IN)[None, :]
        next_tile = tl.load(lines + after, mask=mask, other=0.0)
        values = add_residual(total_out, x, residual, i, i < NUM_IN, HAS_RESIDUAL)
        squares += tl.sum(values * values, 0)
        values *= tl.load(norm_weight + i, mask=i < NUM_IN, other=0.0)
        sums += tl.sum(tile.to(tl.float32) * values[None, :], 1)
        tile = next_tile
    scale = tl.rsqrt(squares / NUM_IN + eps)
    dtype = x.dtype.element_ty
    tl.store(logits + out, (sums * scale).to(dtype).to(tl.float32), mask=is_out)
    if tl.program_id(0) == 0:
        for begin in tl.range(0, NUM_IN, BLOCK_IN):
            i = begin + lanes
            values = add_residual(total_out, x, residual, i, i < NUM_IN, HAS_RESIDUAL)
            factor = tl.load(norm_weight + i, mask=i < NUM_IN, other=0.0)
            result = ((values * scale).to(dtype) * factor).to(dtype)
            tl.store(normed + i, result, mask=i < NUM_IN)
    tl.debug_barrier()  # what every thread stored comes before the count
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        experts = tl.arange(0, BLOCK)
        is_expert = experts < num_experts
        least = -float("inf")
        values = tl.load(logits + experts, mask=is_expert, other=least, cache_modifier=".cg")
        _choose(ids, weights, values, is_expert, dtype, TOP_K, TOP_K_BLOCK, IS_NORMALIZED)
        tl.store(counter, 0)


@triton.jit
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Turn the bits of a float into an integer that is ordered like it, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pair_gate_up(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    ids,
    upcoming,
    share,
    num_out,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[pair] = silu(gate) * up; then asks L2 for a share of the weight that comes next."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = (out < num_out)[:, None]
    gates = weight + expert * 2 * num_out * NUM_IN + out[:, None] * NUM_IN
    ups = gates + num_out * NUM_IN
    gate_sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN, loop_unroll_factor=2):
        i = begin + tl.arange(0, BLOCK_IN)
        is_in = i < NUM_IN
        mask = is_out & is_in[None, :]
        gate = tl.load(gates + i[None, :], mask=mask, other=0.0)
        up = tl.load(ups + i[None, :], mask=mask, other=0.0)
        values = tl.load(x + pair // TOP_K * NUM_IN + i, mask=is_in, other=0.0)
        values = values.to(tl.float32)[None, :]
        gate_sums += gate.to(tl.float32) * values
        up_sums += up.to(tl.float32) * values
    if upcoming is not None:
        expert_bytes = NUM_IN * num_out * (y.dtype.element_ty.primitive_bitwidth // 8)
        prefetch_share(upcoming + expert * NUM_IN * num_out, share, expert_bytes)
    gate = tl.sum(gate_sums, 1)
    value = activate(gate, "silu") * tl.sum(up_sums, 1)
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
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile has the same lines of all the experts of a token, whose sum never leaves it."""
    token = tl.program_id(1)
    lines = tl.arange(0, TOP_K_BLOCK * BLOCK_OUT)
    choice = lines // BLOCK_OUT
    outs = tl.program_id(0) * BLOCK_OUT + lines % BLOCK_OUT
    is_line = ((choice < TOP_K) & (outs < num_out))[:, None]
    pair = token * TOP_K + choice
    # The kernel before this one started after the choice was made: weights need not wait for it.
    expert = tl.load(ids + pair, mask=choice < TOP_K, other=0, cache_modifier=".cg").to(tl.int64)
    places = weight + ((expert * num_out + outs) * NUM_IN)[:, None]
    lanes = tl.arange(0, BLOCK_IN)[None, :]
    tile = tl.load(places + lanes, mask=is_line & (lanes < NUM_IN), other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((TOP_K_BLOCK * BLOCK_OUT, BLOCK_IN), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + lanes
        after = i + BLOCK_IN
        next_tile = tl.load(places + after, mask=is_line & (after < NUM_IN), other=0.0)
        values = tl.load(y + pair[:, None] * NUM_IN + i, mask=is_line & (i < NUM_IN), other=0.0)
        sums += tile.to(tl.float32) * values.to(tl.float32)
        tile = next_tile
    factors = tl.load(pair_weights + pair, mask=choice < TOP_K, other=0.0)
    totals = tl.sum((tl.sum(sums, 1) * factors).reshape(TOP_K_BLOCK, BLOCK_OUT), 0)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    places = out + token * num_out + outs
    tl.store(places, totals.to(out.dtype.element_ty), mask=outs < num_out)
