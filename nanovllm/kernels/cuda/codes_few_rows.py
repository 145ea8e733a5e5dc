"""Projections of a few rows by weights that stay quantised, widened to operands of tensor cores.

A program has so many rows of the weight, some rows of x and a part of the inputs. It reads codes
once, but every program reads x: with 64 rows and 128 outputs in a program, 128 inputs of x are 16
KB, those of the weight 16 KB in FP8 and 8 KB in 4 bits. So tiles are as high as registers allow,
and inputs are split until there are programs for all processors.

Sums of splits are added by the norm that follows, or by the last program of a tile to arrive.

On an H200, whose memory gives each processor 19 bytes a cycle, a tile of 128 x 128 is read in 850
cycles in FP8 and in 430 in 4 bits. Each of 8 warps takes 280 instructions for it in FP8 and 240 in
4 bits, of which widening is half or more: 560 and 480 cycles of the four schedulers. The product
with 64 rows takes 510. (Counted in what the compiler makes of the loop, not measured.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.cuda.code_words import as_operands, join_places, raised_by
from nanovllm.kernels.cuda.linear_tiles import add_bias, fit_stages, store_tile, tile_rows
from nanovllm.kernels.cuda.pdl import launch_options, prefetch, wait_for_inputs
from nanovllm.kernels.ops import Activation
from nanovllm.kernels.stored_weights import BLOCK, Int4Weight, StoredWeight, num_blocks

MAX_SPLITS = 8
MAX_PROGRAMS = 384  # for which inputs are split
NUM_PREFETCHED = tl.constexpr(128)  # words of each output, prefetched before x is there
CACHE_LINE = tl.constexpr(32)  # words


@dataclass(frozen=True, slots=True)
class CodesConfig:
    block_out: int  # rows of the weight in one program
    block_rows: int  # of x
    num_warps: int
    num_stages: int
    num_splits: int  # parts of the inputs


def codes_config(weight: StoredWeight, num_rows: int) -> CodesConfig:
    """By Qwen3-8B's shapes on an H200; so many splits that some hundred programs share the work."""
    num_out, num_in = weight.shape
    is_int4, block_rows = isinstance(weight, Int4Weight), max(16, triton.next_power_of_2(num_rows))
    if block_rows == 16:
        tile = (128, 16, 4, 4) if is_int4 else (64, 16, 4, 6)
        programs = MAX_PROGRAMS
    else:
        tile = (128, min(block_rows, 64), 4 if is_int4 and block_rows <= 64 else 8, 3)
        programs = 192 if is_int4 else 128
    num_tiles = triton.cdiv(num_out, tile[0]) * triton.cdiv(num_rows, tile[1])
    most = min(MAX_SPLITS, max(num_in // 256, 1))
    num_splits = min(triton.next_power_of_2(triton.cdiv(programs, num_tiles)), most)
    block_out, block_rows, num_warps, num_stages = tile
    stage_bytes = (block_out * weight.bits + block_rows * 16) * BLOCK // 8
    num_stages = fit_stages(num_stages, stage_bytes, weight.words.device)
    return CodesConfig(block_out, block_rows, num_warps, num_stages, num_splits)


def make_counters(device: torch.device) -> Tensor:
    """As many as there may be tiles whose inputs are split."""
    return torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)


def codes_few_rows(
    x: Tensor,  # [rows, in], contiguous
    weight: StoredWeight,  # gated: gate, then up
    bias: Tensor | None,
    activation: Activation | None,
    arrived: Tensor | None,
    config: CodesConfig | None = None,
) -> Tensor:
    """Project x to [rows, out], or to partial sums: float32 [splits, rows, out].

    `arrived`, from make_counters, is where programs count each other: the sums are then finished.
    They are zeros before and after.
    """
    num_rows, num_in = x.shape
    config = config or codes_config(weight, num_rows)
    num_splits, num_words = config.num_splits, weight.words.shape[1]
    num_out = weight.shape[0] if activation is None else weight.shape[0] // 2
    block_out = config.block_out if activation is None else config.block_out // 2
    lanes = num_words // num_blocks(num_in)
    grid = triton.cdiv(num_rows, config.block_rows), triton.cdiv(num_out, block_out), num_splits
    is_finished = num_splits == 1 or arrived is not None
    assert is_finished or activation is None
    shape = (num_rows, num_out) if is_finished else (num_splits, num_rows, num_out)
    y = torch.empty(shape, device=x.device, dtype=x.dtype if is_finished else torch.float32)
    parts = None
    if num_splits > 1 and arrived is not None:
        assert len(arrived) >= grid[0] * grid[1]
        size = grid[0] * grid[1] * num_splits, config.block_out * config.block_rows
        parts = torch.empty(size, device=x.device, dtype=torch.float32), arrived
    _few_rows[grid](
        *(y, x, weight.words, weight.scales, weight.zeros, bias, parts, num_rows, num_out),
        triton.cdiv(num_words, num_splits * lanes) * lanes,
        NUM_IN=num_in,
        NUM_WORDS=num_words,
        LANES=lanes,
        GROUP=weight.group,
        BLOCK_ROWS=config.block_rows,
        BLOCK_OUT=block_out,
        ACTIVATION=activation,
        IS_EVEN=num_out % block_out == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(x, num_rows),
    )
    return y


@triton.jit(do_not_specialize=("num_rows",))  # one kernel serves all batches up to BLOCK_ROWS
def _few_rows(  # type: ignore[no-untyped-def]
    y,
    x,
    words,
    scales,
    zeros,
    bias,
    parts,
    num_rows,
    num_out,
    split_words,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The grid is (rows, outputs, splits): programs of the same outputs run at the same time."""
    first, tile = tl.program_id(2) * split_words, tl.program_id(1)
    end = tl.minimum(first + split_words, NUM_WORDS)
    w_rows, is_out = tile_rows(tile, num_out, BLOCK_OUT, ACTIVATION is not None)
    if OVERLAP and IS_EVEN:  # the kernels before this one do not write the weight
        for word in tl.range(first, tl.minimum(end, first + NUM_PREFETCHED), CACHE_LINE):
            prefetch(words + w_rows.to(tl.int64) * NUM_WORDS + word)
    wait_for_inputs(OVERLAP)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    sums = multiply_codes(
        *(words, w_rows, is_out, (scales, zeros), x + rows[None, :] * NUM_IN, is_row),
        *(first, end, NUM_IN, NUM_WORDS, LANES, GROUP, IS_EVEN),
    )
    if parts is None:
        sums = add_bias(sums, bias, w_rows, is_out, first == 0)
        targets = tl.program_id(2) * num_rows + rows
        store_tile(y, sums, tile, targets, is_row, num_out, BLOCK_OUT, ACTIVATION)
    else:
        sums, is_last = add_parts(sums, parts)
        if is_last:
            sums = add_bias(sums, bias, w_rows, is_out, is_last)
            store_tile(y, sums, tile, rows, is_row, num_out, BLOCK_OUT, ACTIVATION)


@triton.jit
def multiply_codes(  # type: ignore[no-untyped-def]
    words,
    w_rows,
    is_out,
    stored,
    x_start,
    is_row,
    first,
    end,
    NUM_IN: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """The products of some rows of a weight with rows of x, over the words from `first` on.

    GROUP is that of a scale; 0: a row has one. Scales multiply the sums of groups; of codes, the
    compiler would take the products through shared memory. They are loaded a block ahead: the loop
    would wait for them, as only what is loaded in words or more is pipelined.
    """
    PLACES: tl.constexpr = 128 // LANES
    PARTS: tl.constexpr = 128 // GROUP if GROUP > 0 else 1  # of a block
    # Sums of groups are waited for: once, if their places are joined. Others go on by themselves.
    JOINED: tl.constexpr = PLACES // PARTS if GROUP > 0 else 1
    NUM_GROUPS: tl.constexpr = NUM_WORDS // LANES * PARTS if GROUP > 0 else 1
    dtype: tl.constexpr = x_start.dtype.element_ty
    lanes = tl.arange(0, LANES)
    w_start = words + w_rows.to(tl.int64)[:, None] * NUM_WORDS
    s_start = w_rows.to(tl.int64) * NUM_GROUPS
    sums = tl.zeros((w_rows.shape[0], is_row.shape[0]), tl.float32)
    group = first // LANES * PARTS if GROUP > 0 else 0
    scale, less = load_groups(stored, s_start, is_out, group, NUM_GROUPS, PARTS, dtype)
    for word in tl.range(first, end, LANES):
        if IS_EVEN:
            tile = tl.load(w_start + (word + lanes)[None, :])
        else:
            tile = tl.load(w_start + (word + lanes)[None, :], mask=is_out[:, None], other=0)
        next_scale, next_less = scale, less
        if GROUP > 0:
            after = (word // LANES + 1) * PARTS
            next_scale, next_less = load_groups(
                stored, s_start, is_out, after, NUM_GROUPS, PARTS, dtype
            )
        codes = as_operands(tile, PLACES, dtype)
        if PLACES == 8:
            codes = lower_codes(codes, less, PARTS)
        for part in tl.static_range(PARTS):
            products = sums if GROUP == 0 else tl.zeros_like(sums)
            for n in tl.static_range(part * PLACES // PARTS, (part + 1) * PLACES // PARTS, JOINED):
                i = word * PLACES + LANES * n + tl.arange(0, LANES * JOINED)
                mask = is_row[None, :]
                if NUM_IN % 128 != 0:
                    mask = mask & (i < NUM_IN)[:, None]
                x_tile = tl.load(x_start + i[:, None], mask=mask, other=0.0)
                products = tl.dot(join_places(codes, n, JOINED), x_tile, products)
            sums = products if GROUP == 0 else sums + products * scale[part]
        scale, less = next_scale, next_less
    return sums * scale[0] if GROUP == 0 else sums


@triton.jit
def load_groups(  # type: ignore[no-untyped-def]
    stored,
    s_start,
    is_out,
    group,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The scales of the groups of a block, and what raised codes are to be lowered by."""
    is_there = is_out & (group < NUM_GROUPS)  # after the last block there is none
    places = s_start + group
    s0, l0 = _load_group(stored, places, is_there, dtype)
    if PARTS == 1:
        return (s0,), (l0,)
    elif PARTS == 2:
        s1, l1 = _load_group(stored, places + 1, is_there, dtype)
        return (s0, s1), (l0, l1)
    else:
        s1, l1 = _load_group(stored, places + 1, is_there, dtype)
        s2, l2 = _load_group(stored, places + 2, is_there, dtype)
        s3, l3 = _load_group(stored, places + 3, is_there, dtype)
        return (s0, s1, s2, s3), (l0, l1, l2, l3)


@triton.jit
def _load_group(stored, places, is_there, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(stored[0] + places, mask=is_there, other=0.0).to(tl.float32)[:, None]
    less = -raised_by(dtype) - 8.0
    if stored[1] is None:
        return scale, tl.full((1, 1), less, dtype)
    else:
        zero = tl.load(stored[1] + places, mask=is_there, other=0).to(tl.float32)
        return scale, (less + 8.0 - zero).to(dtype)[:, None]


@triton.jit
def lower_codes(codes, less, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what lowers them to raised codes of 4 bits."""
    return (
        codes[0] + less[0],
        codes[1] + less[PARTS // 8],
        codes[2] + less[2 * PARTS // 8],
        codes[3] + less[3 * PARTS // 8],
        codes[4] + less[4 * PARTS // 8],
        codes[5] + less[5 * PARTS // 8],
        codes[6] + less[6 * PARTS // 8],
        codes[7] + less[7 * PARTS // 8],
    )


@triton.jit
def add_parts(sums, parts):  # type: ignore[no-untyped-def]
    """Leave sums to the last of a tile's programs, which gets all of them; tell whether it is."""
    SIZE: tl.constexpr = sums.shape[0] * sums.shape[1]
    places = tl.arange(0, sums.shape[0])[:, None] * sums.shape[1]
    places += tl.arange(0, sums.shape[1])[None, :]
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    num_splits = tl.num_programs(2)
    first = parts[0] + tile.to(tl.int64) * num_splits * SIZE
    tl.store(first + tl.program_id(2) * SIZE + places, sums)
    tl.debug_barrier()  # all threads' stores come before the count
    count = tl.atomic_add(parts[1] + tile, 1, sem="acq_rel", scope="gpu")
    is_last = count == num_splits - 1
    if is_last:
        tl.store(parts[1] + tile, 0)
        sums = tl.zeros_like(sums)
        for split in tl.range(0, num_splits):  # in one order, whoever is last
            sums += tl.load(first + split * SIZE + places, cache_modifier=".cg")
    return sums, is_last
