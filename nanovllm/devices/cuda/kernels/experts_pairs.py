"""MoE on CUDA for few tokens: every (token, expert) pair reads the expert's weights separately.

With more tokens, or quantized weights, experts_grouped.py reads an expert once per tile of pairs.
Only the device knows which experts are chosen, so the grids do not depend on the choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.elementwise import activate
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import Routing


class Tiles(NamedTuple):
    gate_up_block: int  # outputs of gate and of up per CTA
    down_elements: int  # elements of the down weights that a CTA loads at a time
    down_block: int  # maximum inputs per load


ONE_TOKEN = Tiles(gate_up_block=1, down_elements=8192, down_block=256)
MORE_TOKENS = Tiles(gate_up_block=2, down_elements=4096, down_block=128)


class SharedWeights(NamedTuple):
    """The weights of a shared expert of the same size as the others; all are contiguous."""

    gate_up: Tensor  # [2 * size, hidden]
    down: Tensor  # [hidden, size]
    gate: Tensor  # [1, hidden]


def route(
    logits: Tensor, routing: Routing, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids and routing weights of each token's experts, and the ranks of the pairs.

    All three are [tokens, top_k]. A pair is a token with one of its experts. Its rank is its index
    among the pairs of the same expert, in any order. `counts` [experts], if given, is incremented
    by the number of pairs of each expert. Without `counts`, the ranks are uninitialized.
    """
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, routing.top_k, device=logits.device, dtype=torch.int32)
    ranks = torch.empty_like(ids)  # not a slice: another alignment would compile another kernel
    weights = torch.empty(ids.shape, device=logits.device, dtype=torch.float32)
    _route[(num_tokens,)](
        *(ids, weights, logits, ranks, counts, num_experts),
        TOP_K=routing.top_k,
        IS_NORMALIZED=routing.is_normalized,
        BLOCK=triton.next_power_of_2(num_experts),
        num_warps=1,  # routing one token is too little work for more warps
        **launch_options(logits, num_tokens),
    )
    return ids, weights, ranks


def run_pairs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: SharedWeights | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; all tensors are contiguous.

    The weights of the experts are [experts, outputs, inputs]. The down kernel processes all experts
    of a token at once, which is faster than one by one. The shared expert forms one more pair with
    each token, after all other pairs.
    """
    num_tokens, top_k = ids.shape
    _, hidden, size = down.shape
    num_pairs = num_tokens * (top_k if shared is None else top_k + 1)
    y = torch.empty(num_pairs, size, device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    own_gate_up, own_down, gate = shared or (None, None, None)
    factors = None if shared is None else torch.empty(num_tokens, device=x.device)
    options = {"TOP_K": top_k, **launch_options(x, num_tokens)}
    tiles = ONE_TOKEN if num_tokens == 1 else MORE_TOKENS
    _gate_up[(triton.cdiv(size, tiles.gate_up_block), num_pairs)](
        *(y, x, gate_up, ids, own_gate_up, gate, factors, size),
        NUM_IN=hidden,
        BLOCK_OUT=tiles.gate_up_block,
        BLOCK_IN=min(triton.next_power_of_2(hidden), 2048),
        num_warps=4,
        **options,
    )
    block_in = min(max(size & -size, 64), tiles.down_block)  # divides `size` if possible
    block_out = max(tiles.down_elements // (triton.next_power_of_2(top_k) * block_in), 1)
    _down[(triton.cdiv(hidden, block_out), num_tokens)](
        *(out, y, down, ids, weights, own_down, factors, hidden),
        NUM_IN=size,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
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
    num_experts,
    TOP_K: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    choices = tl.arange(0, triton.next_power_of_2(TOP_K))
    is_choice = choices < TOP_K
    pairs = token * TOP_K + choices
    logits += token * num_experts
    experts, values = _choose(logits, num_experts, choices, TOP_K, BLOCK)
    shares = _weigh(logits, values, is_choice, num_experts, IS_NORMALIZED, BLOCK)
    tl.store(ids + pairs, experts, mask=is_choice)
    tl.store(weights + pairs, shares, mask=is_choice)
    if counts is not None:
        rank = tl.atomic_add(counts + experts, 1, mask=is_choice, sem="relaxed")
        tl.store(ranks + pairs, rank, mask=is_choice)


@triton.jit
def _choose(logits, num_experts, choices, TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the top-k experts of a token and their logits; ties go to the lower index."""
    keys = _load_keys(logits, num_experts, BLOCK)
    experts, values = choices * 0, choices * 0.0
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        expert = (BLOCK - 1 - (best & (BLOCK - 1))).to(tl.int32)
        experts = tl.where(choices == choice, expert, experts)
        values = tl.where(choices == choice, _logit_of(best, BLOCK), values)
        keys = _drop(keys, keys == best)
    return experts, values


@triton.jit
def _logit_of(key, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the logit of a key of `_load_keys`."""
    if key.dtype == tl.int64:
        bits = (key >> 32).to(tl.int32)
    else:
        bits = tl.where(key < 0, key | (BLOCK - 1), key & -BLOCK)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(logits, num_experts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Map logits to distinct integers in the same order; of equal logits, the first ranks higher.

    A NaN sorts beyond the infinity of its sign.
    """
    experts = tl.arange(0, BLOCK)
    values = tl.load(logits + experts, mask=experts < num_experts, other=0.0, cache_modifier=".cg")
    bits = tl.where(values == 0.0, 0.0, values.to(tl.float32)).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if values.dtype == tl.float32:
        keys = (keys.to(tl.int64) << 32) + (BLOCK - 1 - experts)
    else:  # 16-bit logits leave the low bits free for the index
        tl.static_assert(BLOCK <= 8192)
        keys = (keys & -BLOCK) + (BLOCK - 1 - experts)
    return _drop(keys, experts >= num_experts)


@triton.jit
def _drop(keys, is_dropped):  # type: ignore[no-untyped-def]
    lowest: tl.constexpr = -(1 << (keys.dtype.primitive_bitwidth - 1))
    return tl.where(is_dropped, lowest, keys)


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    logits,
    values,
    is_choice,
    num_experts,
    IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the routing weights of the chosen experts, rounded to the logits' dtype.

    They are softmax probabilities over all experts or, if IS_NORMALIZED, over the chosen ones,
    whose logits are `values`.
    """
    values = tl.where(is_choice, values, -float("inf"))
    highest = tl.max(values, 0)
    shares = tl.exp(values - highest)
    if IS_NORMALIZED:
        total = tl.sum(shares, 0)
    else:
        i = tl.arange(0, BLOCK)
        every = tl.load(logits + i, mask=i < num_experts, other=-float("inf"), cache_modifier=".cg")
        total = tl.sum(tl.exp(every.to(tl.float32) - highest), 0)
    return (shares / total).to(logits.dtype.element_ty).to(tl.float32)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    ids,
    shared_weight,
    shared_gate,
    factors,
    num_out,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute y[pair] = silu(gate) * up for BLOCK_OUT outputs of one pair.

    For a pair with the shared expert, the first CTA also computes its factor,
    sigmoid(x @ shared_gate).
    """
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(1)
    token, own = pair // TOP_K, weight
    if shared_weight is None:
        own += tl.load(ids + pair).to(tl.int64) * 2 * num_out * NUM_IN
    else:
        num_tokens = tl.num_programs(1) // (TOP_K + 1)
        if pair < num_tokens * TOP_K:
            own = weight + tl.load(ids + pair).to(tl.int64) * 2 * num_out * NUM_IN
        else:
            token, own = pair - num_tokens * TOP_K, shared_weight
            if tl.program_id(0) == 0:
                factor = _dot_row(x + token.to(tl.int64) * NUM_IN, shared_gate, NUM_IN, BLOCK_IN)
                tl.store(factors + token, tl.sigmoid(factor))
    x += token.to(tl.int64) * NUM_IN
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = (out < num_out)[:, None]
    gates = own + out[:, None] * NUM_IN
    ups = gates + num_out * NUM_IN
    gate_sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN, loop_unroll_factor=2):
        i = begin + tl.arange(0, BLOCK_IN)
        is_in = i < NUM_IN
        mask = is_out & is_in[None, :]
        gate = tl.load(gates + i[None, :], mask=mask, other=0.0)
        up = tl.load(ups + i[None, :], mask=mask, other=0.0)
        values = tl.load(x + i, mask=is_in, other=0.0)
        values = values.to(tl.float32)[None, :]
        gate_sums += gate.to(tl.float32) * values
        up_sums += up.to(tl.float32) * values
    value = activate(tl.sum(gate_sums, 1), "silu") * tl.sum(up_sums, 1)
    tl.store(y + pair * num_out + out, value.to(y.dtype.element_ty), mask=out < num_out)


@triton.jit
def _dot_row(x, weight, NUM_IN: tl.constexpr, BLOCK_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK_IN,), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + tl.arange(0, BLOCK_IN)
        values = tl.load(x + i, mask=i < NUM_IN, other=0.0).to(tl.float32)
        total += values * tl.load(weight + i, mask=i < NUM_IN, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    out,
    y,
    weight,
    ids,
    pair_weights,
    shared_weight,
    factors,
    num_out,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of the down projection for one token.

    They are weighted sums over the token's top-k experts and, if given, the shared expert.
    """
    token = tl.program_id(1)
    choices = tl.arange(0, triton.next_power_of_2(TOP_K))
    is_choice = choices < TOP_K
    pairs = token * TOP_K + choices
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = (is_choice[:, None] & (outs < num_out)[None, :])[:, :, None]
    # The expert ids may be read before this kernel's wait: the previous kernel waited for them.
    expert = tl.load(ids + pairs, mask=is_choice, other=0, cache_modifier=".cg").to(tl.int64)
    w_start = weight + ((expert[:, None] * num_out + outs[None, :]) * NUM_IN)[:, :, None]
    lanes = tl.arange(0, BLOCK_IN)
    w_tile = tl.load(w_start + lanes, mask=is_out & (lanes < NUM_IN), other=0.0)
    if shared_weight is not None:
        j = tl.arange(0, triton.next_power_of_2(NUM_IN))
        is_shared = (outs < num_out)[:, None] & (j < NUM_IN)
        shared = tl.load(shared_weight + outs[:, None] * NUM_IN + j, mask=is_shared, other=0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((choices.shape[0], BLOCK_OUT, BLOCK_IN), tl.float32)
    for begin in tl.range(0, NUM_IN, BLOCK_IN):
        i = begin + lanes
        after = i + BLOCK_IN
        next_tile = tl.load(w_start + after, mask=is_out & (after < NUM_IN), other=0.0)
        mask = is_choice[:, None] & (i < NUM_IN)
        values = tl.load(y + pairs[:, None] * NUM_IN + i, mask=mask, other=0.0)
        sums += w_tile.to(tl.float32) * values.to(tl.float32)[:, None, :]
        w_tile = next_tile
    shares = tl.load(pair_weights + pairs, mask=is_choice, other=0.0)
    totals = tl.sum(tl.sum(sums, 2) * shares[:, None], 0)
    if shared_weight is not None:
        last = y + (tl.num_programs(1) * TOP_K + token) * NUM_IN
        inputs = tl.load(last + j, mask=j < NUM_IN, other=0.0).to(tl.float32)
        totals += tl.sum(shared.to(tl.float32) * inputs, 1) * tl.load(factors + token)
    tl.store(out + token * num_out + outs, totals.to(out.dtype.element_ty), mask=outs < num_out)
