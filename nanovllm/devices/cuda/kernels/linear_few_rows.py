"""Skinny GEMMs on CUDA: projections of a few rows, dominated by the time to read the weight.

A CTA multiplies a tile of weight rows by a tile of rows of x. If this gives too few CTAs to fill
the device, K is split over several CTAs (split-K). Their partial sums are added up by the norm that
follows or, for a quantized weight without a norm after it, by the last CTA to finish a tile.

A quantized weight is read once and dequantized to MMA operands, but every CTA reads x. Over 128
inputs, 64 rows of x are 16 KB, whereas 128 weight rows are 16 KB in FP8 and 8 KB in int4. So a tile
has as many weight rows as registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.devices.cuda.kernels.dequantize import CudaWeight, weight_arguments, weight_sizes
from nanovllm.devices.cuda.kernels.linear_tiles import (
    add_bias,
    fit_stages,
    multiply_tile,
    store_tile,
    tile_rows,
)
from nanovllm.devices.cuda.kernels.pdl import launch_options, prefetch, wait_for_inputs
from nanovllm.ops.interface import Activation
from nanovllm.ops.quantized_weight import BLOCK, QuantizedWeight

DENSE_BLOCK_OUT = 64  # rows of a dense weight per CTA: the M of a tensor-core instruction
NUM_CTAS = 128  # number of CTAs that fill the device, for dense weights
MAX_SPLITS = 4  # maximum number of K splits for a dense weight
# Without split-K, this kernel is faster than cuBLAS up to this many rows and weight bytes.
MAX_ROWS, MAX_BYTES = 64, 32 << 20
# If the next norm adds up the partial sums, split-K beats cuBLAS up to MAX_ROWS rows, and up to
# MAX_SPLIT_ROWS rows for weights of at most MAX_SPLIT_BYTES.
MAX_SPLIT_ROWS, MAX_SPLIT_BYTES = 256, 6 << 20
MAX_QUANTIZED_SPLITS = 8
MAX_SPLIT_TILES = 384  # a GEMM with a quantized weight and this many tiles or more is not split


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    block_out: int  # rows of the weight per CTA
    block_rows: int  # rows of x per CTA
    block_in: int  # inputs per iteration
    num_warps: int
    num_stages: int
    num_splits: int  # number of K splits


def has_few_rows(num_rows: int, weight: Tensor) -> bool:
    """Whether this kernel beats cuBLAS, which starts more slowly but reads the weight faster."""
    return num_rows <= MAX_ROWS and weight.nbytes <= MAX_BYTES


def choose_splits(num_rows: int, weight: Tensor) -> int:
    """Return the number of K splits for a dense weight: a power of two that fills the device.

    It is 1 for a single row, and for so many rows that cuBLAS is faster.
    """
    is_small = num_rows <= MAX_SPLIT_ROWS and weight.nbytes <= MAX_SPLIT_BYTES
    if num_rows == 1 or not (is_small or num_rows <= MAX_ROWS):
        return 1
    num_out, num_in = weight.shape
    wanted = NUM_CTAS * DENSE_BLOCK_OUT // num_out
    most = max(1, min(wanted, MAX_SPLITS, num_in // 128))
    return 1 << (most.bit_length() - 1)


def few_rows_config(weight: CudaWeight, num_rows: int, num_splits: int = 1) -> FewRowsConfig:
    """Return the config of a skinny GEMM; `num_splits` applies only to a dense weight."""
    if isinstance(weight, QuantizedWeight):
        return _quantized_config(weight, num_rows)
    # 65 to 128 rows are divided between two CTAs: one CTA for all would leave half the SMs idle.
    block_rows = 128 if num_rows > 128 else min(max(16, triton.next_power_of_2(num_rows)), 64)
    block_in = 128 // weight.itemsize  # a cache line
    stage_bytes = (DENSE_BLOCK_OUT + block_rows) * weight.itemsize * block_in
    most = min(8, weight.shape[1] // num_splits // block_in + 1)
    num_stages = fit_stages(most, stage_bytes, weight.device)
    return FewRowsConfig(DENSE_BLOCK_OUT, block_rows, block_in, 4, num_stages, num_splits)


def _quantized_config(weight: QuantizedWeight, num_rows: int) -> FewRowsConfig:
    """Return a config tuned for Qwen3-8B's shapes on an H200; it aims for 128 to 384 CTAs."""
    num_out, num_in = weight.shape
    is_int4, block_rows = weight.bits == 4, max(16, triton.next_power_of_2(num_rows))
    if block_rows == 16:
        tile = (128, 16, 4, 4) if is_int4 else (64, 16, 4, 6)
        num_ctas = MAX_SPLIT_TILES
    else:
        tile = (128, min(block_rows, 64), 4 if is_int4 and block_rows <= 64 else 8, 3)
        num_ctas = 192 if is_int4 else 128
    num_tiles = triton.cdiv(num_out, tile[0]) * triton.cdiv(num_rows, tile[1])
    most = min(MAX_QUANTIZED_SPLITS, max(num_in // 256, 1))
    num_splits = min(triton.next_power_of_2(triton.cdiv(num_ctas, num_tiles)), most)
    block_out, block_rows, num_warps, num_stages = tile
    stage_bytes = (block_out * weight.bits + block_rows * 16) * BLOCK // 8
    num_stages = fit_stages(num_stages, stage_bytes, weight.qweight.device)
    return FewRowsConfig(block_out, block_rows, BLOCK, num_warps, num_stages, num_splits)


def make_counters(device: torch.device) -> Tensor:
    """Return zeroed counters, one for each tile that may be computed by several K splits."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def few_rows_linear(
    x: Tensor,  # [rows, in], contiguous
    weight: CudaWeight,  # [out, in], contiguous; with an activation: gate rows, then up rows
    bias: Tensor | None,
    activation: Activation | None,
    arrived: Tensor | None = None,
    config: FewRowsConfig | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the projection of x, [rows, out], or its partial sums, float32 [splits, rows, out].

    Partial sums are returned if K is split and `arrived` is None. With the counters `arrived` (from
    make_counters), the last CTA of each tile adds up the tile's partial sums. The counters are zero
    before and after the call.
    """
    num_rows, num_in = x.shape
    config = config or few_rows_config(weight, num_rows)
    num_splits, sizes = config.num_splits, weight_sizes(weight)
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    block_out = config.block_out if activation is None else config.block_out // 2
    step = sizes["LANES"] or config.block_in  # words per iteration
    is_even = num_out % block_out == 0
    if isinstance(weight, Tensor):
        is_even = is_even and num_in % (num_splits * config.block_in) == 0
    grid = triton.cdiv(num_rows, config.block_rows), triton.cdiv(num_out, block_out), num_splits
    is_finished = num_splits == 1 or arrived is not None
    assert is_finished or activation is None
    shape = (num_rows, num_out) if is_finished else (num_splits, num_rows, num_out)
    dtype = out_dtype or x.dtype if is_finished else torch.float32
    y = torch.empty(shape, device=x.device, dtype=dtype)
    partials = None
    if num_splits > 1 and arrived is not None:
        assert len(arrived) >= grid[0] * grid[1]
        size = grid[0] * grid[1] * num_splits, config.block_out * config.block_rows
        partials = torch.empty(size, device=x.device, dtype=torch.float32), arrived
    split_words = triton.cdiv(sizes["NUM_WORDS"], num_splits * step) * step
    _few_rows[grid](
        *(y, x, *weight_arguments(weight), bias, partials, num_rows, num_out, split_words),
        **sizes,
        COUNT=split_words if isinstance(weight, Tensor) else 0,
        BLOCK_ROWS=config.block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=config.block_in,
        ACTIVATION=activation,
        IS_EVEN=is_even,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(x, num_rows),
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))  # one kernel for all batch sizes
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    stored,
    bias,
    partials,
    num_rows,
    num_out,
    split_words,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one tile of outputs, over one K split.

    The grid is (rows, outputs, splits), so that CTAs with the same weight rows run concurrently.
    """
    CACHE_LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    if COUNT > 0:
        split_words = COUNT
    first, tile = tl.program_id(2) * split_words, tl.program_id(1)
    end = tl.minimum(first + split_words, NUM_WORDS)
    num_prefetched = COUNT if COUNT > 0 else end - first
    w_rows, is_out = tile_rows(tile, num_out, BLOCK_OUT, ACTIVATION is not None)
    # The weight can be prefetched before the wait, since no kernel writes it.
    if OVERLAP and IS_EVEN:
        for word in tl.range(0, tl.minimum(num_prefetched, 4 * CACHE_LINE), CACHE_LINE):
            prefetch(weight + w_rows.to(tl.int64) * NUM_WORDS + first + word)
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    sums = multiply_tile(
        *(weight, stored, w_rows, is_out, x + rows[None, :] * NUM_IN, is_row, first, end),
        *(NUM_IN, NUM_WORDS, LANES, GROUP, COUNT, BLOCK_IN, IS_EVEN),
    )
    if partials is None:
        sums = add_bias(sums, bias, w_rows, is_out, first == 0)
        targets = tl.program_id(2) * num_rows + rows
        store_tile(y, sums, tile, targets, is_row, num_out, BLOCK_OUT, ACTIVATION)
    else:
        sums, is_last = add_partials(sums, partials)
        if is_last:
            sums = add_bias(sums, bias, w_rows, is_out, is_last)
            store_tile(y, sums, tile, rows, is_row, num_out, BLOCK_OUT, ACTIVATION)


@triton.jit
def add_partials(sums, partials):  # type: ignore[no-untyped-def]
    """Store this CTA's partial sums. The last CTA of the tile returns the total and True."""
    SIZE: tl.constexpr = sums.shape[0] * sums.shape[1]
    offsets = tl.arange(0, sums.shape[0])[:, None] * sums.shape[1]
    offsets += tl.arange(0, sums.shape[1])[None, :]
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    num_splits = tl.num_programs(2)
    first = partials[0] + tile.to(tl.int64) * num_splits * SIZE
    tl.store(first + tl.program_id(2) * SIZE + offsets, sums)
    tl.debug_barrier()  # orders all threads' stores before the increment
    count = tl.atomic_add(partials[1] + tile, 1, sem="acq_rel", scope="gpu")
    is_last = count == num_splits - 1
    if is_last:
        tl.store(partials[1] + tile, 0)
        sums = tl.zeros_like(sums)
        # The order of the sum does not depend on which CTA is last, so the result is deterministic.
        for split in tl.range(0, num_splits):
            sums += tl.load(first + split * SIZE + offsets, cache_modifier=".cg")
    return sums, is_last
