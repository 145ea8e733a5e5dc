"""Experts whose weights stay quantised, for few tokens: every pair (token, expert) reads its own.

As in experts_pairs.py, with codes that are multiplied as in codes_one_row.py. The rows of all
experts are those of one weight, one expert's after another's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.code_words import load_words
from nanovllm.kernels.cuda.codes_one_row import add_products, load_inputs, prepare_inputs
from nanovllm.kernels.cuda.elementwise import activate
from nanovllm.kernels.cuda.linear_tiles import tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, wait_for_inputs
from nanovllm.kernels.stored_weights import StoredWeight, num_blocks

GATE_UP_BLOCK, DOWN_BLOCK = 8, 8  # outputs of a program
MAX_IN = 4096  # in a tile
TOGETHER = tl.constexpr(4)  # experts of a token whose weights are loaded before the first is used


def run_code_pairs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: StoredWeight,
    down: StoredWeight,
) -> Tensor:
    """Return the weighted sum of each token's experts; all tensors are contiguous."""
    num_tokens, top_k = ids.shape
    hidden, size = x.shape[1], down.num_in
    y = torch.empty(num_tokens * top_k, size, device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    _gate_up[(triton.cdiv(size, GATE_UP_BLOCK), len(y))](
        *(y, x, gate_up.words, (gate_up.scales, gate_up.zeros), ids, size),
        TOP_K=top_k,
        BLOCK_OUT=GATE_UP_BLOCK,
        num_warps=4,
        **_sizes(gate_up),
        **launch_options(x, num_tokens),
    )
    _down[(triton.cdiv(hidden, DOWN_BLOCK), num_tokens)](
        *(out, y, down.words, (down.scales, down.zeros), ids, weights, hidden),
        TOP_K=top_k,
        BLOCK_OUT=DOWN_BLOCK,
        num_warps=4,
        **_sizes(down),
        **launch_options(x, num_tokens),
    )
    return out


def _sizes(weight: StoredWeight) -> dict[str, int]:
    num_words, blocks = weight.words.shape[1], num_blocks(weight.num_in)
    lanes = num_words // blocks
    block_words = min(triton.next_power_of_2(blocks), MAX_IN // 128) * lanes
    sizes = {"NUM_IN": weight.num_in, "NUM_WORDS": num_words, "LANES": lanes}
    return {**sizes, "GROUP": weight.group, "BLOCK_WORDS": block_words}


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    y,
    x,
    words,
    stored,
    ids,
    num_out,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[pair] = silu(gate) * up."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(1)
    rows, is_row = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, True)
    rows += tl.load(ids + pair).to(tl.int64) * (2 * num_out)
    row = x + pair // TOP_K * NUM_IN
    sums = tl.zeros((2 * BLOCK_OUT,), tl.float32)
    for begin in tl.range(0, NUM_WORDS, BLOCK_WORDS):
        word = begin + tl.arange(0, BLOCK_WORDS)
        tile = load_words(words, rows, is_row, word, NUM_WORDS)
        inputs, _ = load_inputs((row, row, None), None, word, NUM_IN, LANES)
        inputs, totals = prepare_inputs(inputs, LANES, GROUP)
        sums += add_products(
            *(tile, inputs, totals, stored, rows, is_row, begin // LANES, NUM_WORDS, LANES, GROUP)
        )
    sums *= _row_scale(stored, rows, is_row, GROUP)
    gate, up = tl.split(sums.reshape(2, BLOCK_OUT).permute(1, 0))
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    value = (activate(gate, "silu") * up).to(y.dtype.element_ty)
    tl.store(y + pair * num_out + out, value, mask=out < num_out)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    out,
    y,
    words,
    stored,
    ids,
    pair_weights,
    num_out,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes the same outputs of all experts of a token, and adds them up."""
    token = tl.program_id(1)
    first_pair = token * TOP_K
    outs, is_out = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, False)
    lanes = tl.arange(0, BLOCK_WORDS)
    # The kernel before this one started after the choice was made: weights need not wait for it.
    experts = (ids, first_pair, num_out)
    tiles = _load_together(words, experts, outs, is_out, 0, lanes, NUM_WORDS, TOP_K)
    wait_for_inputs(OVERLAP)
    totals_of_experts = tl.zeros((BLOCK_OUT,), tl.float32)
    for begin in tl.range(0, NUM_WORDS, BLOCK_WORDS):
        for first in tl.static_range(0, TOP_K, TOGETHER):
            if first > 0:
                tiles = _load_together(
                    words, experts, outs, is_out, first, begin + lanes, NUM_WORDS, TOP_K
                )
            for n in tl.static_range(TOGETHER):
                if first + n < TOP_K:
                    pair = first_pair + first + n
                    rows = outs + tl.load(ids + pair).to(tl.int64) * num_out
                    row = y + pair * NUM_IN
                    inputs, _ = load_inputs((row, row, None), None, begin + lanes, NUM_IN, LANES)
                    inputs, totals = prepare_inputs(inputs, LANES, GROUP)
                    sums = add_products(
                        *(tiles[n], inputs, totals, stored, rows, is_out, begin // LANES),
                        *(NUM_WORDS, LANES, GROUP),
                    )
                    sums *= _row_scale(stored, rows, is_out, GROUP)
                    totals_of_experts += sums * tl.load(pair_weights + pair)
        if NUM_WORDS > BLOCK_WORDS:
            after = begin + BLOCK_WORDS + lanes
            tiles = _load_together(words, experts, outs, is_out, 0, after, NUM_WORDS, TOP_K)
    place = out + token * num_out + outs
    tl.store(place, totals_of_experts.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _load_together(  # type: ignore[no-untyped-def]
    words,
    experts,
    outs,
    is_out,
    first: tl.constexpr,
    word,
    NUM_WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Load some words of the weights of a token's experts from the `first` on."""
    return (
        _load_of_expert(words, experts, outs, is_out, first, word, NUM_WORDS, TOP_K),
        _load_of_expert(words, experts, outs, is_out, first + 1, word, NUM_WORDS, TOP_K),
        _load_of_expert(words, experts, outs, is_out, first + 2, word, NUM_WORDS, TOP_K),
        _load_of_expert(words, experts, outs, is_out, first + 3, word, NUM_WORDS, TOP_K),
    )


@triton.jit
def _load_of_expert(  # type: ignore[no-untyped-def]
    words,
    experts,
    outs,
    is_out,
    choice: tl.constexpr,
    word,
    NUM_WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    if choice < TOP_K:
        expert = tl.load(experts[0] + experts[1] + choice, cache_modifier=".cg").to(tl.int64)
        return load_words(words, outs + expert * experts[2], is_out, word, NUM_WORDS)
    else:
        return tl.zeros((outs.shape[0], word.shape[0]), tl.int32)


@triton.jit
def _row_scale(stored, rows, is_row, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of each row, where groups have none."""
    if GROUP == 0:
        return tl.load(stored[0] + rows, mask=is_row, other=0.0)
    else:
        return 1.0
