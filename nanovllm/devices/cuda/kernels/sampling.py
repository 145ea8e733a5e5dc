"""Sampling on CUDA: one token per row, the argmax of logits plus noise (the Gumbel-max trick).

The noise is a pure function of (seed, position, token id). A sampled token therefore does not
depend on the other rows, on CUDA graphs, on preemption, or on how a row is split over CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm import sampling_params
from nanovllm.devices.cuda.kernels.top_k_top_p import (
    CAPACITY,
    COLUMNS,
    GROUP_SIZE,
    LOG2_E,
    find_maxima,
    find_thresholds,
    load_row_max,
)
from nanovllm.ops import torch_sampling
from nanovllm.ops.interface import Sampling
from nanovllm.ops.torch_sampling import SamplingColumns

NO_TOKEN = tl.constexpr(sampling_params.NO_TOKEN)
MIN_BLOCK = 1024
ID_FACTOR = tl.constexpr(torch_sampling.ID_FACTOR)
FIRST_FACTOR = tl.constexpr(torch_sampling.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(torch_sampling.SECOND_FACTOR)
STEP = tl.constexpr(torch_sampling.STEP % 2**64)
MIX_FIRST = tl.constexpr(torch_sampling.MIX_FIRST % 2**64)
MIX_SECOND = tl.constexpr(torch_sampling.MIX_SECOND % 2**64)
LARGEST_UNIFORM = tl.constexpr(torch_sampling.LARGEST_UNIFORM)
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Split:
    """How a row is split: over `num_splits` CTAs with `num_tiles` tiles of `block` ids each."""

    block: int
    num_tiles: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Intermediate results that the kernels of one call pass to each other."""

    scores: Tensor  # float32 [rows, splits]: best score of each split
    ids: Tensor  # int32 [rows, splits]: token id with the best score of each split
    maxima: Tensor  # float32 [rows, splits]: largest logit of each split
    group_maxima: Tensor  # float32 [rows, groups]: largest logit of each group of GROUP_SIZE ids
    pivots: Tensor  # float32 [rows]: the candidates of a row are its logits >= pivot
    candidates: Tensor  # float32 [rows, CAPACITY]: candidate logits, in any order
    num_candidates: Tensor  # int32 [rows]: number of logits >= pivot; may exceed CAPACITY
    masses: Tensor  # int64 [rows, splits]: sum of `_mass` over the tokens of each split
    thresholds: Tensor  # float32 [rows]: smallest logit that top_k and top_p keep


def sampling_workspace(
    max_rows: int, vocab_size: int, device: torch.device | str
) -> SamplingWorkspace:
    max_splits = triton.cdiv(vocab_size, MIN_BLOCK)

    def table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

    return SamplingWorkspace(
        scores=table(max_splits),
        ids=table(max_splits, dtype=torch.int32),
        maxima=table(max_splits),
        group_maxima=table(triton.cdiv(vocab_size, GROUP_SIZE)),
        pivots=table(),
        candidates=table(CAPACITY.value),
        num_candidates=table(dtype=torch.int32),
        masses=table(max_splits, dtype=torch.int64),
        thresholds=table(),
    )


def sample_tokens(
    logits: Tensor,
    slots: Tensor,
    columns: SamplingColumns,
    context_lens: Tensor,
    asked: Sampling,
    out: Tensor,
    workspace: SamplingWorkspace,
    tokens: Tensor | None = None,
    lengths: Tensor | None = None,
    host: Tensor | None = None,
) -> None:
    """Sample a token for each row into `out` [rows]: the argmax of the kept logits plus noise.

    `columns` holds the sampling parameters, indexed by slot; `context_lens` gives the
    positions of the new tokens. `asked` may include features that no row uses; this does not change
    the tokens. With `tokens` and `lengths`, each token is also appended to its slot, as by
    `advance`. `host` [rows], if given, is pinned memory that receives a copy of `out`.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    assert num_rows <= len(workspace.thresholds), "the workspace is too small for these rows"
    if num_rows == 0:
        return
    split = split_vocabulary(num_rows, vocab_size)
    has_min_p, has_top = Sampling.MIN_P in asked, Sampling.TOP_K_TOP_P in asked
    if has_min_p or has_top:
        find_maxima(logits, workspace, split, groups=has_top)
    if has_top:
        find_thresholds(logits, slots, columns, workspace, split)
    max_splits = workspace.scores.shape[1]
    _draw_kernel[(num_rows, split.num_splits)](
        *(workspace.scores, workspace.ids, logits, logits.stride(0), slots, context_lens),
        *(columns.temperature, columns.min_p, columns.seed),
        workspace.maxima if has_min_p or has_top else None,
        workspace.thresholds if has_top else None,
        *(vocab_size, split.num_tiles, split.num_splits),
        MAX_SPLITS=max_splits,
        HAS_NOISE=Sampling.RANDOM in asked,
        IS_NATIVE=logits.is_cuda,
        BLOCK=split.block,
        num_warps=4,
    )
    table = (0, 0, 0) if tokens is None else (tokens.stride(0), *tokens.shape)
    _combine_kernel[(num_rows,)](
        *(out, host, workspace.scores, workspace.ids, split.num_splits),
        *(slots, context_lens, tokens, lengths, *table),
        MAX_SPLITS=max_splits,
        num_warps=1,
    )


def split_vocabulary(num_rows: int, vocab_size: int) -> Split:
    """Choose how rows are split over CTAs: the fewer rows, the more CTAs per row."""
    block = MIN_BLOCK if num_rows <= 16 else 2 * MIN_BLOCK
    num_tiles = triton.cdiv(vocab_size, block)
    tiles_each = triton.cdiv(num_tiles, max(1, 2048 // num_rows))
    return Split(block, tiles_each, triton.cdiv(num_tiles, tiles_each))


def advance(
    out: Tensor, slots: Tensor, context_lens: Tensor, tokens: Tensor, lengths: Tensor
) -> None:
    """Append each row's token to its slot, after its context; the last slot is padding."""
    num_rows = len(out)
    if num_rows:
        _advance_kernel[(triton.cdiv(num_rows, 256),)](
            *(out, slots, context_lens, tokens, tokens.stride(0), lengths),
            *(num_rows, *tokens.shape),
            BLOCK=256,
        )


@triton.jit(do_not_specialize=["num_tiles", "num_splits"], do_not_specialize_on_alignment=COLUMNS)
def _draw_kernel(  # type: ignore[no-untyped-def]
    scores,
    best_ids,
    logits,
    stride,
    slots,
    context_lens,
    temperature,
    min_p,
    seed,
    maxima,
    thresholds,
    vocab_size,
    num_tiles,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best score, logit + temperature * noise, among the tokens of a split.

    Greedy rows have temperature 0.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + row)
    row_temperature = tl.load(temperature + slot)
    scale = -LN_2 * row_temperature
    key = _row_key(tl.load(seed + slot), tl.load(context_lens + row))
    threshold = -float("inf") if thresholds is None else tl.load(thresholds + row)
    row_max, min_p_offset = 0.0, -float("inf")
    if maxima is not None:
        row_max = load_row_max(maxima, row, num_splits, MAX_SPLITS)
        min_p_offset = _min_p_offset(row_temperature, tl.load(min_p + slot))
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = split * num_tiles * BLOCK + lanes
    for tile in range(split * num_tiles, (split + 1) * num_tiles):
        ids = tile * BLOCK + lanes
        value = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf"))
        score = value.to(tl.float32)
        score = tl.where(score == score, score, float("inf"))  # NaN becomes inf
        if maxima is not None or thresholds is not None:
            is_kept = (score >= threshold) & (score - row_max >= min_p_offset) | (
                score == float("inf")
            )
            score = tl.where(is_kept, score, -float("inf"))
            # Most tiles have no kept token: skip their noise, which is expensive.
            is_drawn = tl.max(score, 0) > -float("inf")
        else:
            is_drawn = True
        if is_drawn:
            if HAS_NOISE:
                score += scale * _log_exponential(_noise(ids, key), IS_NATIVE)
            is_better = score > best
            best = tl.where(is_better, score, best)
            best_id = tl.where(is_better, ids, best_id)
    top = tl.max(best, 0)
    offset = row * MAX_SPLITS + split
    tl.store(scores + offset, top)
    tl.store(best_ids + offset, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=COLUMNS)
def _combine_kernel(  # type: ignore[no-untyped-def]
    out,
    host,
    scores,
    ids,
    num_splits,
    slots,
    context_lens,
    tokens,
    lengths,
    stride,
    num_slots,
    width,
    MAX_SPLITS: tl.constexpr,
):
    """Reduce a row's splits to the best token; write it to the slot if `tokens` is given."""
    row = tl.program_id(0)
    splits = tl.arange(0, triton.next_power_of_2(MAX_SPLITS))
    offsets = row.to(tl.int64) * MAX_SPLITS + splits
    is_inside = splits < num_splits
    score = tl.load(scores + offsets, mask=is_inside, other=-float("inf"))
    best_id = tl.load(ids + offsets, mask=is_inside, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    token = tl.min(tl.where(score == top, best_id, 0x7FFFFFFF), 0)
    token = tl.where(tl.abs(top) == float("inf"), NO_TOKEN, token)
    tl.store(out + row, token)
    if host is not None:
        tl.store(host + row, token)
    if tokens is not None:
        slot, position = tl.load(slots + row), tl.load(context_lens + row)
        _append(token, slot, position, row >= 0, tokens, lengths, stride, num_slots, width)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=COLUMNS)
def _advance_kernel(  # type: ignore[no-untyped-def]
    out,
    slots,
    context_lens,
    tokens,
    stride,
    lengths,
    num_rows,
    num_slots,
    width,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    slot = tl.load(slots + rows, mask=is_row, other=0)
    token = tl.load(out + rows, mask=is_row, other=0)
    position = tl.load(context_lens + rows, mask=is_row, other=0)
    _append(token, slot, position, is_row, tokens, lengths, stride, num_slots, width)


@triton.jit
def _append(token, slot, position, is_row, tokens, lengths, stride, num_slots, width):  # type: ignore[no-untyped-def]
    is_appended = is_row & (slot < num_slots - 1) & (position < width)
    known = tl.maximum(token, 0)  # NO_TOKEN is negative, and the next step embeds this token
    tl.store(tokens + slot.to(tl.int64) * stride + position, known, mask=is_appended)
    tl.store(lengths + slot, position + 1, mask=is_appended)


@triton.jit
def _min_p_offset(temperature, min_p):  # type: ignore[no-untyped-def]
    """Return the lowest (logit - largest logit of the row) that min_p keeps; at most 0."""
    return tl.where(min_p > 0.0, temperature * tl.log(tl.maximum(min_p, 1.2e-38)), -float("inf"))


@triton.jit
def _row_key(seed, position):  # type: ignore[no-untyped-def]
    """Hash a seed and a position to 64 bits; different seeds never collide at the same position."""
    seed_key = _mix(seed.to(tl.uint64) + STEP)
    return _mix(seed_key + position.to(tl.uint64) * STEP)


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    """Apply the finalizer of splitmix64, a bijection."""
    bits = (bits ^ (bits >> 30)) * MIX_FIRST
    bits = (bits ^ (bits >> 27)) * MIX_SECOND
    return bits ^ (bits >> 31)


@triton.jit
def _noise(ids, key):  # type: ignore[no-untyped-def]
    """Hash each id with the row's key to 32 bits; each half of the key enters in its own round."""
    bits = ids.to(tl.uint32) * ID_FACTOR + key.to(tl.uint32)
    bits ^= bits >> 16
    bits = bits * FIRST_FACTOR + (key >> 32).to(tl.uint32)
    bits ^= bits >> 15
    bits *= SECOND_FACTOR
    return bits ^ (bits >> 16)


@triton.jit
def _log_exponential(bits, IS_NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return log2(-log2(1 - u)), where u is uniform in (0, 1), made from random bits."""
    uniform = tl.minimum(bits.to(tl.float32) * (2.0**-32) + 2.0**-33, LARGEST_UNIFORM)
    # Tokens with the best scores have a small u, for which 1 - u loses most bits: use a series.
    series = LOG2_E / 2 + uniform * (LOG2_E / 3 + uniform * (LOG2_E / 4))
    series = uniform * (LOG2_E + uniform * series)
    exponential = tl.where(uniform < 0.0625, series, -_log2(1 - uniform, IS_NATIVE))
    return _log2(exponential, IS_NATIVE)


@triton.jit
def _log2(x, IS_NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    # lg2.approx is one instruction instead of thirty, and precise enough for noise. Triton's
    # interpreter cannot run inline assembly.
    if IS_NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)
