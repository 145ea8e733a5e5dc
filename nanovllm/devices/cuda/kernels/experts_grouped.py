"""MoE on CUDA as a grouped GEMM: (token, expert) pairs are sorted by expert and form tiles.

A tile holds pairs of one expert. Only the device knows the number of tiles, so the grids are sized
for the maximum, and CTAs without a tile exit immediately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.dequantize import CudaWeight, weight_arguments, weight_sizes
from nanovllm.devices.cuda.kernels.experts_pairs import route
from nanovllm.devices.cuda.kernels.linear_tiles import (
    fit_stages,
    multiply_tile,
    store_tile,
    tile_rows,
)
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.ops.interface import Routing
from nanovllm.ops.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    block_rows: int  # pairs per tile
    block_out: int  # outputs per CTA
    block_in: int  # inputs per iteration
    num_warps: int
    num_stages: int


# (maximum average number of pairs per expert, config). The pairs of an expert should usually fit
# into one tile, so that its weights are read only once.
CONFIGS = (
    (8, GroupedConfig(16, 64, 64, 4, 8)),
    (20, GroupedConfig(32, 64, 64, 4, 8)),
    (48, GroupedConfig(64, 128, 64, 4, 4)),
    (math.inf, GroupedConfig(128, 128, 64, 8, 4)),
)
# The same for quantized weights, with 128 inputs per iteration.
QUANTIZED_CONFIGS = (
    (8, GroupedConfig(16, 64, 128, 4, 5)),
    (20, GroupedConfig(32, 128, 128, 8, 4)),
    (48, GroupedConfig(64, 128, 128, 8, 4)),
    (math.inf, GroupedConfig(128, 128, 128, 8, 3)),
)


def grouped_config(
    rows_per_expert: int, x: Tensor, weight: QuantizedWeight | None = None
) -> GroupedConfig:
    """Return the config for dense experts or, if `weight` is given, for quantized ones."""
    if weight is None and x.dtype == torch.float32:  # tensor cores are not used
        return GroupedConfig(16 if rows_per_expert <= 8 else 64, 64, 32, 4, 2)
    configs = CONFIGS if weight is None else QUANTIZED_CONFIGS
    config = next(config for most, config in configs if rows_per_expert <= most)
    bits = 8 * x.itemsize if weight is None else weight.bits
    stage_bits = (config.block_rows * 8 * x.itemsize + config.block_out * bits) * config.block_in
    return replace(config, num_stages=fit_stages(config.num_stages, stage_bits // 8, x.device))


def run_grouped(
    x: Tensor,
    logits: Tensor,
    gate_up: CudaWeight,
    down: CudaWeight,
    routing: Routing,
    config: GroupedConfig | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; all tensors are contiguous.

    A quantized weight concatenates the rows of all experts; a dense one is [experts, outputs,
    inputs].
    """
    num_tokens, top_k, num_experts = len(x), routing.top_k, logits.shape[1]
    hidden, size = x.shape[1], down.shape[-1]
    num_pairs = num_tokens * top_k
    quantized = None if isinstance(down, Tensor) else down
    config = config or grouped_config(num_pairs // num_experts, x, quantized)
    counts = torch.zeros(num_experts, device=x.device, dtype=torch.int32)
    ids, weights, ranks = route(logits, routing, counts)
    max_tiles = min(num_pairs, num_experts + num_pairs // config.block_rows)
    order = torch.empty(num_pairs, device=x.device, dtype=torch.int32)
    tiles = torch.empty(max_tiles, 3, device=x.device, dtype=torch.int32)
    experts_block = triton.next_power_of_2(num_experts)
    block = max(4096 // experts_block, 16)
    options = launch_options(x, num_tokens)
    _sort[(triton.cdiv(num_pairs, block),)](
        order,
        tiles,
        ids,
        ranks,
        counts,
        num_pairs,
        max_tiles,
        num_experts,
        BLOCK_ROWS=config.block_rows,
        BLOCK=block,
        EXPERTS=experts_block,
        num_warps=4,
        **options,
    )
    y = torch.empty(num_pairs, size, device=x.device, dtype=x.dtype)
    _multiply(y, x, gate_up, order, tiles, top_k, config, is_gated=True)
    pair_outputs = torch.empty(num_tokens, top_k, hidden, device=x.device, dtype=x.dtype)
    _multiply(pair_outputs, y, down, order, tiles, top_k, config, is_gated=False)
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(hidden), 1024)
    grid = num_tokens, triton.cdiv(hidden, block)
    _add_choices[grid](out, pair_outputs, weights, hidden, TOP_K=top_k, BLOCK=block, **options)
    return out


def _multiply(
    y: Tensor,
    x: Tensor,
    weight: CudaWeight,
    order: Tensor,
    tiles: Tensor,
    top_k: int,
    config: GroupedConfig,
    is_gated: bool,
) -> None:
    """Multiply the input of every pair by the weight of its expert.

    The gated GEMM (gate_up) reads the rows of tokens, and writes the pairs sorted by expert. The
    `down` GEMM reads the sorted pairs, and writes them in their original order.
    """
    num_out, num_in = y.shape[-1], x.shape[-1]
    num_rows = 2 * num_out if is_gated else num_out
    block_out = config.block_out // 2 if is_gated else config.block_out
    _grouped[(triton.cdiv(num_out, block_out), len(tiles))](
        y,
        x,
        *weight_arguments(weight),
        order,
        tiles,
        num_out,
        NUM_ROWS=num_rows,
        **weight_sizes(weight),
        TOP_K=top_k,
        BLOCK_ROWS=config.block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=config.block_in,
        ACTIVATION="silu" if is_gated else None,
        IS_EVEN=num_out % block_out == 0 and num_in % config.block_in == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(x, len(order) // top_k),
    )


@triton.jit(do_not_specialize=("num_pairs", "max_tiles"))
def _sort(  # type: ignore[no-untyped-def]
    order,
    tiles,
    ids,
    ranks,
    counts,
    num_pairs,
    max_tiles,
    num_experts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sort pairs by expert; write each tile's expert, first pair, and end of the expert's pairs.

    The first pair and the end are indices in the sorted order. The thread of pair i also writes
    tile i: there are at most as many tiles as pairs.
    """
    wait_for_inputs(OVERLAP)
    experts = tl.arange(0, EXPERTS)[None, :]
    count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < num_pairs, other=0)[:, None]
    start = tl.sum(tl.where(experts < expert, count, 0), 1)
    rank = tl.load(ranks + i, mask=i < num_pairs, other=0)
    tl.store(order + start + rank, i, mask=i < num_pairs)

    tile_ends = tl.cumsum((count + BLOCK_ROWS - 1) // BLOCK_ROWS, 1)
    is_before = tile_ends <= i[:, None]
    expert = tl.sum(is_before.to(tl.int32), 1)  # at least num_experts if the tile does not exist
    first_tile = tl.max(tl.where(is_before, tile_ends, 0), 1)
    start = tl.sum(tl.where(is_before, count, 0), 1)
    end = start + tl.sum(tl.where(experts == expert[:, None], count, 0), 1)
    is_tile = i < max_tiles
    tl.store(tiles + 3 * i, expert, mask=is_tile)
    tl.store(tiles + 3 * i + 1, start + (i - first_tile) * BLOCK_ROWS, mask=is_tile)
    tl.store(tiles + 3 * i + 2, end, mask=is_tile)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    stored,
    order,
    tiles,
    num_out,
    NUM_ROWS: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply a tile of pairs by a tile of the expert's weight; the grid is (outputs, tiles)."""
    wait_for_inputs(OVERLAP)
    tile = tiles + 3 * tl.program_id(1)
    expert, begin, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if begin >= end:
        return
    w_rows, is_out = tile_rows(tl.program_id(0), num_out, BLOCK_OUT, ACTIVATION is not None)
    w_rows += expert * NUM_ROWS
    rows = begin + tl.arange(0, BLOCK_ROWS)
    is_row = rows < end
    pairs = tl.load(order + rows, mask=is_row, other=0).to(tl.int64)
    sources = rows.to(tl.int64) if ACTIVATION is None else pairs // TOP_K
    x_start = x + sources[None, :] * NUM_IN
    sums = multiply_tile(
        *(weight, stored, w_rows, is_out, x_start, is_row, 0, NUM_WORDS),
        *(NUM_IN, NUM_WORDS, LANES, GROUP, NUM_IN, BLOCK_IN, IS_EVEN),
    )
    targets = pairs if ACTIVATION is None else rows.to(tl.int64)
    store_tile(y, sums, tl.program_id(0), targets, is_row, num_out, BLOCK_OUT, ACTIVATION)


@triton.jit
def _add_choices(  # type: ignore[no-untyped-def]
    out, pair_outputs, weights, dim, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        outputs = pair_outputs + (token * TOP_K + choice) * dim + i
        weight = tl.load(weights + token * TOP_K + choice)
        total += weight * tl.load(outputs, mask=i < dim, other=0.0).to(tl.float32)
    tl.store(out + token * dim + i, total.to(out.dtype.element_ty), mask=i < dim)
