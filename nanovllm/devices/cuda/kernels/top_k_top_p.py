"""Find the exact logit threshold of top_k and top_p for each row, without sorting.

top_p applies to the tokens that top_k keeps. The threshold is first searched among the candidates:
the largest few thousand logits of a row. If it is not among them, the whole row is searched. Both
searches determine the threshold bit by bit, from the most significant bit down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.devices.cuda.kernels.sampling import SamplingWorkspace, Split
    from nanovllm.ops.torch_sampling import SamplingColumns

GROUP_SIZE = 32  # neighboring token ids per group; the groups' maxima determine the pivot
COLUMNS = ("slots", "context_lens")  # kernel arguments that are slices: their alignment varies
CAPACITY = tl.constexpr(4096)  # maximum number of candidates per row
ROW_BLOCK = tl.constexpr(8192)  # logits per iteration when a whole row is searched
NUM_WANTED = 2048  # target number of candidates; there may be more (ties, several in a group)
# Number of leading bits in which two logits of a dtype, as float32, can differ.
KEY_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}
# Probability masses are summed in fixed point (1.0 is 2**42), so that the order of summation does
# not matter. 2**20 tokens cannot overflow int64.
MASS_ONE = tl.constexpr(float(2**42))
LOG2_E = tl.constexpr(1.4426950408889634)


def find_maxima(logits: Tensor, workspace: SamplingWorkspace, split: Split, groups: bool) -> None:
    """Store the largest logit of each split of each row; if `groups`, also of each group of ids."""
    num_rows, vocab_size = logits.shape
    _maxima_kernel[(num_rows, split.num_splits)](
        workspace.maxima,
        workspace.group_maxima,
        logits,
        logits.stride(0),
        vocab_size,
        split.num_tiles,
        MAX_SPLITS=workspace.maxima.shape[1],
        MAX_GROUPS=workspace.group_maxima.shape[1],
        GROUP=GROUP_SIZE if groups else 0,
        BLOCK=split.block,
        num_warps=4,
    )


def find_thresholds(
    logits: Tensor,
    slots: Tensor,
    columns: SamplingColumns,
    workspace: SamplingWorkspace,
    split: Split,
) -> None:
    """Compute each row's logit threshold for top_k and top_p (-inf: keep all).

    Call find_maxima with `groups` first.
    """
    num_rows, vocab_size = logits.shape
    parameters = columns.temperature, columns.top_k, columns.top_p
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    max_splits = workspace.maxima.shape[1]
    _pivot_kernel[(num_rows,)](
        workspace.pivots,
        workspace.num_candidates,
        workspace.group_maxima,
        slots,
        parameters,
        vocab_size,
        num_groups,
        0 if vocab_size <= CAPACITY else min(NUM_WANTED, num_groups * 3 // 4),
        MAX_GROUPS=workspace.group_maxima.shape[1],
        BLOCK=triton.next_power_of_2(num_groups),
        num_warps=8,
    )
    found = (
        *(workspace.candidates, workspace.num_candidates, workspace.masses),
        *(logits, logits.stride(0), slots, parameters),
        *(workspace.maxima, workspace.pivots, vocab_size),
    )
    _gather_kernel[(num_rows, split.num_splits)](
        *found,
        split.num_tiles,
        split.num_splits,
        MAX_SPLITS=max_splits,
        BLOCK=split.block,
        num_warps=4,
    )
    _threshold_kernel[(num_rows,)](
        workspace.thresholds,
        *found,
        split.num_splits,
        MAX_SPLITS=max_splits,
        KEY_BITS=KEY_BITS[logits.dtype],
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _maxima_kernel(  # type: ignore[no-untyped-def]
    maxima,
    group_maxima,
    logits,
    stride,
    vocab_size,
    num_tiles,
    MAX_SPLITS: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    lane_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    for tile in range(split * num_tiles, (split + 1) * num_tiles):
        value = _load_logits(logits + row * stride, tile * BLOCK + lanes, vocab_size)
        lane_max = tl.maximum(lane_max, value)
        if GROUP > 0:
            group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            group_max = tl.max(tl.reshape(value, (BLOCK // GROUP, GROUP)), 1)
            is_inside = group * GROUP < vocab_size
            tl.store(group_maxima + row * MAX_GROUPS + group, group_max, mask=is_inside)
    tl.store(maxima + row * MAX_SPLITS + split, tl.max(lane_max, 0))


@triton.jit(do_not_specialize=["num_wanted"], do_not_specialize_on_alignment=COLUMNS)
def _pivot_kernel(  # type: ignore[no-untyped-def]
    pivots,
    num_candidates,
    group_maxima,
    slots,
    parameters,
    vocab_size,
    num_groups,
    num_wanted,
    MAX_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose a pivot such that at least `num_wanted` group maxima, and so tokens, are >= pivot.

    The pivot is at least `_lowest`; if this bound applies, fewer tokens may be >= pivot.
    """
    row = tl.program_id(0)
    tl.store(num_candidates + row, 0)
    temperature, k, p = _load_parameters(parameters, tl.load(slots + row), vocab_size)
    if (k > 0) | (p < 1.0):
        groups = tl.arange(0, BLOCK)
        maxima = tl.load(
            group_maxima + row.to(tl.int64) * MAX_GROUPS + groups,
            mask=groups < num_groups,
            other=-float("inf"),
        )
        weights = (groups < num_groups).to(tl.int32)
        # A pivot of 16 bits is precise enough: the number of candidates need not be exact.
        key = _descend(_to_key(maxima), weights, None, num_wanted, False, 16)
        pivot = tl.where(num_wanted > 0, _from_key(key, 16), -float("inf"))
        tl.store(pivots + row, tl.maximum(pivot, _lowest(tl.max(maxima, 0), temperature)))


@triton.jit(do_not_specialize=["num_tiles", "num_splits"], do_not_specialize_on_alignment=COLUMNS)
def _gather_kernel(  # type: ignore[no-untyped-def]
    candidates,
    num_candidates,
    masses,
    logits,
    stride,
    slots,
    parameters,
    maxima,
    pivots,
    vocab_size,
    num_tiles,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather a split's logits >= pivot, in any order, and sum the mass of all its tokens."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature, k, p = _load_parameters(parameters, tl.load(slots + row), vocab_size)
    if (k > 0) | (p < 1.0):
        row_max = load_row_max(maxima, row, num_splits, MAX_SPLITS)
        pivot = tl.load(pivots + row)
        first_tile, lanes = split * num_tiles, tl.arange(0, BLOCK)
        mass = tl.zeros((BLOCK,), tl.int64)
        count = tl.zeros((BLOCK,), tl.int32)
        for tile in range(first_tile, first_tile + num_tiles):
            value = _load_logits(logits + row * stride, tile * BLOCK + lanes, vocab_size)
            mass += _mass(value, row_max, temperature)
            count += (value >= pivot).to(tl.int32)
        tl.store(masses + row * MAX_SPLITS + split, tl.sum(mass, 0))
        total = tl.sum(count, 0)
        if total > 0:
            offset = tl.atomic_add(num_candidates + row, total, sem="relaxed")
            offset += tl.cumsum(count, 0) - count
            for tile in range(first_tile, first_tile + num_tiles):
                value = _load_logits(logits + row * stride, tile * BLOCK + lanes, vocab_size)
                fits = (value >= pivot) & (offset < CAPACITY)
                tl.store(candidates + row * CAPACITY + offset, value, mask=fits)
                offset += (value >= pivot).to(tl.int32)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=COLUMNS)
def _threshold_kernel(  # type: ignore[no-untyped-def]
    thresholds,
    candidates,
    num_candidates,
    masses,
    logits,
    stride,
    slots,
    parameters,
    maxima,
    pivots,
    vocab_size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature, k, p = _load_parameters(parameters, tl.load(slots + row), vocab_size)
    threshold = -float("inf")
    if (k > 0) | (p < 1.0):
        row_max = load_row_max(maxima, row, num_splits, MAX_SPLITS)
        splits = tl.arange(0, triton.next_power_of_2(MAX_SPLITS))
        mass = tl.load(masses + row * MAX_SPLITS + splits, mask=splits < num_splits, other=0)
        total = tl.sum(mass, 0)
        count = tl.load(num_candidates + row)
        offsets = tl.arange(0, CAPACITY)
        is_used = offsets < count
        value = tl.load(candidates + row * CAPACITY + offsets, mask=is_used, other=-float("inf"))
        mass = _mass(value, row_max, temperature)
        is_all = tl.load(pivots + row) <= _lowest(row_max, temperature)
        is_among = tl.where(k > 0, count >= k, tl.sum(mass, 0) >= _limit(p, total))
        whole = logits, vocab_size, row_max, temperature
        if (is_all | is_among) & (count <= CAPACITY):
            weights = is_used.to(tl.int32), mass
            k = tl.minimum(k, count)
            threshold = _search(_to_key(value), weights, whole, k, p, total, KEY_BITS)
        else:
            threshold = _search(None, (None, None), whole, k, p, total, KEY_BITS)
    tl.store(thresholds + row, threshold)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    keys, weights, whole, k, p, total, KEY_BITS: tl.constexpr
):
    """Return the threshold of a row, searched among `keys` or, without keys, in the whole row.

    `weights` holds the counts (1 for each key) and the masses of the keys. `whole` is (logits,
    vocab_size, largest logit, temperature) of the row.
    """
    key = tl.zeros((), tl.uint32)
    if k > 0:
        key = _descend(keys, weights[0], whole, k, True, KEY_BITS)
        total = _sum_from(key, keys, weights[1], whole, False)
    if p < 1.0:
        key = _descend(keys, weights[1], whole, _limit(p, total), False, KEY_BITS)
    return _from_key(key, KEY_BITS)


@triton.jit
def load_row_max(maxima, row, num_splits, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest logit of a row, from the maxima of its splits."""
    maxima += row * MAX_SPLITS
    splits = tl.arange(0, triton.next_power_of_2(MAX_SPLITS))
    return tl.max(tl.load(maxima + splits, mask=splits < num_splits, other=-float("inf")), 0)


@triton.jit
def _load_parameters(parameters, slot, vocab_size):  # type: ignore[no-untyped-def]
    """Load a slot's temperature, top_k and top_p; k is 0 and p is 1 if they have no effect."""
    temperature, k, p = [tl.load(parameter + slot) for parameter in parameters]
    k = tl.where((temperature > 0.0) & (k < vocab_size), k, 0)
    return temperature, k, tl.where(temperature > 0.0, p, 1.0)


@triton.jit
def _load_logits(logits, ids, vocab_size):  # type: ignore[no-untyped-def]
    return tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def _lowest(row_max, temperature):  # type: ignore[no-untyped-def]
    """Return a logit below which probabilities underflow float32; masked tokens are below it."""
    return row_max - 87.3 * temperature


@triton.jit
def _mass(value, row_max, temperature):  # type: ignore[no-untyped-def]
    """Return the probability of tokens relative to the row's best token, in fixed point."""
    # The bound avoids 0 * inf if the temperature is tiny.
    weight = tl.exp2((value - row_max) * tl.minimum(1.0 / temperature * LOG2_E, 1e30))
    return (weight * MASS_ONE).to(tl.int64)


@triton.jit
def _limit(p, total):  # type: ignore[no-untyped-def]
    """Return the minimum total mass of the tokens that top_p keeps; at least 1."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    limit = exact.to(tl.int64)
    limit += (limit.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(limit, 1)


@triton.jit
def _to_key(value):  # type: ignore[no-untyped-def]
    """Map float32 to unsigned integers in the same order."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_key(key, KEY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float whose key begins with these KEY_BITS bits; its other bits are 0."""
    inverted = (key | ((1 << (32 - KEY_BITS)) - 1)) ^ 0xFFFFFFFF
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, inverted)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _descend(  # type: ignore[no-untyped-def]
    keys,
    weights,
    whole,
    target,
    IS_COUNT: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """Return the largest key such that the total weight of the keys >= it is at least `target`.

    It is determined bit by bit. Without `keys`, the keys are those of all logits of the row.
    """
    key = tl.zeros((), tl.uint32)
    digit = tl.full((), 1 << 31, tl.uint32)
    for _ in range(KEY_BITS):
        higher = key + digit
        reached = _sum_from(higher, keys, weights, whole, IS_COUNT)
        key = tl.where(reached >= target, higher, key)
        digit = digit >> 1
    return key


@triton.jit
def _sum_from(  # type: ignore[no-untyped-def]
    key, keys, weights, whole, IS_COUNT: tl.constexpr
):
    """Sum the weights of the keys >= `key`.

    If `keys` is None, use the whole row: the weights are counts if IS_COUNT, else masses.
    """
    if keys is not None:
        return tl.sum(tl.where(keys >= key, weights, 0), 0)
    else:
        logits, vocab_size, row_max, temperature = whole
        total = tl.zeros((ROW_BLOCK,), tl.int64)
        for start in range(0, vocab_size, ROW_BLOCK):
            ids = start + tl.arange(0, ROW_BLOCK)
            value = _load_logits(logits, ids, vocab_size)
            weight = (
                (ids < vocab_size).to(tl.int64) if IS_COUNT else _mass(value, row_max, temperature)
            )
            total += tl.where(_to_key(value) >= key, weight, 0)
        return tl.sum(total, 0)
