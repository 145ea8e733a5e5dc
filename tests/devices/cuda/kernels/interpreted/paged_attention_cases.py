"""Cases for the paged attention kernels, and a script that runs small ones in the interpreter.

TRITON_INTERPRET=1 python -m tests.interpreted \\
    tests.devices.cuda.kernels.interpreted.paged_attention_cases
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec
from nanovllm.devices.cuda.kernels.attention_configs import (
    TMA_CONFIG,
    AttentionConfig,
    decode_config,
    prefill_config,
)
from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache
from nanovllm.devices.cuda.kernels.paged_attention import (
    QueryRows,
    SharedPartials,
    attend_shared,
    paged_attention,
)
from nanovllm.ops.fp8 import Fp8Rows, dequantize, quantize
from tests.ops.reference_attention import reference_attention

KINDS = ("decode", "prefill", "tma", "shared")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
GARBAGE = {torch.float32: 1e30, torch.float16: 6e4, torch.bfloat16: 1e30}
GROUPS = (1, 2, 4, 7, 8, 16, 20)
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 48, 64, 80, 128, 256)
# Lengths around the boundaries of tiles, blocks and splits.
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 255, 256, 257)
Rows = tuple[tuple[int, int], ...]  # (cached before this step, queries); (0, 0) is padding


@dataclass(frozen=True)
class Case:
    rows: Rows
    group: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    num_splits: int = 1
    config: AttentionConfig | None = None
    is_nan: bool = True  # whether unused cache holds NaN or large numbers
    is_ordered: bool = False  # whether decode rows start longest first
    is_fp8: bool = False  # whether the cache holds FP8 values
    num_shared: int = 0  # blocks that every second row shares, if longer than that
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """The tensors of a case: a permuted table, strided views, and garbage in unused memory."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    slots: Tensor
    query_starts: Tensor
    query_lens: Tensor
    context_lens: Tensor
    out: Tensor
    spec: AttentionSpec
    exponents: tuple[Tensor, Tensor] | tuple[()] = ()

    @property
    def cache(self) -> PagedCache:
        return PagedCache(self.k_cache, self.v_cache, self.block_table, self.exponents)

    def widened(self) -> list[Tensor]:
        """Keys and values in float64."""
        if not self.exponents:
            return [self.k_cache.double(), self.v_cache.double()]
        parts = zip((self.k_cache, self.v_cache), self.exponents, strict=True)
        return [
            dequantize(Fp8Rows(codes, exponents.transpose(1, 2)), torch.float64)
            for codes, exponents in parts
        ]


def make_step(case: Case, device: str) -> Step:
    generator = torch.Generator().manual_seed(case.seed)
    lengths = [start + count for start, count in case.rows]
    max_blocks = -(-max(lengths) // case.block_size) + 2
    num_slots, num_blocks = len(case.rows) + 2, len(case.rows) * max_blocks + 1
    shape = (2, num_blocks, 2, case.block_size, case.num_kv_heads, case.head_dim)
    garbage = math.nan if case.is_nan else GARBAGE[case.dtype]
    layers = torch.full(shape, garbage, dtype=case.dtype, device=device)
    caches = layers[:, :, 1]  # one layer of a buffer: its blocks are not adjacent
    tables = torch.full((num_slots, 3, max_blocks), num_blocks - 1, dtype=torch.int32)
    table = tables[:, 1]  # of one group of layers
    slots = torch.randperm(num_slots, generator=generator)[: len(case.rows)]
    free = torch.randperm(num_blocks - 1, generator=generator).tolist()
    for slot, (start, _), length in zip(slots.tolist(), case.rows, lengths, strict=True):
        first = 0 if case.window is None else max(0, start - case.window + 1)
        for index in range(first // case.block_size, -(-length // case.block_size)):
            block_id = table[slot, index] = free.pop()
            begin = max(first - index * case.block_size, 0)
            end = min(length - index * case.block_size, case.block_size)
            size = (2, end - begin, case.num_kv_heads, case.head_dim)
            values = torch.randn(size, generator=generator).to(case.dtype)
            caches[:, block_id, begin:end] = values.to(device)
    counts = torch.tensor([count for _, count in case.rows])
    starts = place_rows(counts.clamp(min=1), generator)
    num_tokens = int(counts.clamp(min=1).sum()) + 3
    if case.num_shared:  # as in a decode step: row i is token i
        starts, num_tokens = torch.arange(len(counts)), len(counts)
    num_heads = case.group * case.num_kv_heads
    qkv = torch.randn(num_tokens, num_heads + 2, case.head_dim, generator=generator)
    q = qkv.to(case.dtype).to(device)[:, :num_heads]
    sinks = torch.randn(num_heads, generator=generator).to(case.dtype).to(device)
    columns = (slots, starts, counts, torch.tensor(lengths))
    caches, exponents = as_codes(caches) if case.is_fp8 else (caches, ())
    return Step(
        q,
        caches[0],
        caches[1],
        table.to(device),
        *(column.to(torch.int32).to(device) for column in columns),
        torch.full(q.shape, math.nan, dtype=case.dtype, device=device),
        AttentionSpec(
            *(case.head_dim**-0.5, case.window, case.softcap), sinks if case.has_sinks else None
        ),
        exponents,
    )


def as_codes(caches: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Quantize keys and values in the same layout; powers of two give rows different scales."""
    powers = -(torch.arange(caches.shape[:-1].numel()) * 7 % 4).view(caches.shape[:-1])
    rows = quantize(caches * 2.0 ** powers.unsqueeze(-1).to(caches.device))
    layers = torch.stack((rows.values, rows.values), dim=2)
    k, v = rows.exponents.transpose(2, 3).contiguous()
    return layers[:, :, 1], (k, v)


def place_rows(counts: Tensor, generator: torch.Generator) -> Tensor:
    """Assign tokens to the rows in random order; one token stays unused."""
    order = torch.randperm(len(counts), generator=generator)
    starts = torch.empty_like(counts)
    starts[order] = counts[order].cumsum(0) - counts[order]
    return starts + (starts > 0)


def share(case: Case, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Make two groups of rows begin with the same blocks; return groups, members and lengths."""
    num_keys = case.num_shared * case.block_size
    lens, members, groups = torch.zeros_like(step.slots), torch.zeros_like(step.slots), []
    end = 0
    for parity in (0, 1):
        rows = [i for i in range(parity, len(lens), 2) if step.context_lens[i] > num_keys]
        slots = step.slots[rows].long()
        step.block_table[slots, : case.num_shared] = step.block_table[slots[:1], : case.num_shared]
        lens[rows] = num_keys
        members[end : end + len(rows)] = torch.tensor(rows, dtype=torch.int32)
        groups.append((int(slots[0]) if rows else 0, num_keys, end, len(rows)))
        end += len(rows)
    columns = torch.tensor(groups, dtype=torch.int32, device=lens.device).T.contiguous()
    return columns, members, lens


def run_shared(case: Case, step: Step) -> None:
    groups, members, lens = share(case, step)
    num_q_rows = len(step.q) * case.group
    config = case.config or prefill_config(case.head_dim, case.dtype, num_q_rows, case.is_fp8)
    parts = attend_shared(step.q, step.cache, groups, members, step.spec, config)
    rows = QueryRows(step.slots, step.context_lens)
    config = decode_config(case.head_dim, case.dtype, is_fp8=case.is_fp8)
    shared = SharedPartials(lens, parts)
    paged_attention(step.q, step.cache, rows, step.out, step.spec, config, case.num_splits, shared)


def run(case: Case, step: Step, kind: str) -> None:
    longest = max(count for _, count in case.rows)
    if kind == "shared":
        run_shared(case, step)
        return
    if kind == "decode":
        longest_first = step.context_lens.argsort(descending=True).int()
        order = longest_first if case.is_ordered else None
        rows = QueryRows(step.slots, step.context_lens, step.query_starts, order=order)
        config = decode_config(case.head_dim, case.dtype, is_fp8=case.is_fp8)
    else:
        lens = step.context_lens, step.query_starts, step.query_lens
        rows = QueryRows(step.slots, *lens, longest)
        num_q_rows = longest * case.group
        config = prefill_config(case.head_dim, case.dtype, num_q_rows, case.is_fp8)
    if kind == "tma":
        config = TMA_CONFIG
    num_splits = 1 if kind == "tma" else case.num_splits
    config = case.config or config
    tensors = step.q, step.cache, rows, step.out
    paged_attention(*tensors, step.spec, config, num_splits)


def check(case: Case, step: Step, kind: str) -> None:
    """Compare with float64; tokens outside all rows are unchanged, rows without context are 0."""
    expected = torch.full_like(step.out, math.nan, dtype=torch.float64)
    reference = reference_attention(
        *(step.q.double(), *step.widened()),
        step.block_table,
        *(step.slots, step.query_starts, step.query_lens, step.context_lens),
        step.spec,
    )
    for start, count in zip(step.query_starts.tolist(), step.query_lens.tolist(), strict=True):
        count = max(count, 1) if kind in ("decode", "shared") else count
        expected[start : start + count] = reference[start : start + count]
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(
        step.out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def verify(case: Case, kind: str, device: str) -> None:
    step = make_step(case, device)
    run(case, step, kind)
    check(case, step, kind)


@dataclass(frozen=True)
class Limits:
    """The sizes of random cases: the interpreter takes milliseconds per operation of a kernel."""

    num_rows: int
    stretch: int  # largest factor of the lengths
    num_q_rows: int  # maximum queries x heads of a prefill row
    num_kv_heads: int
    num_splits: tuple[int, ...]


SMALL = Limits(num_rows=3, stretch=1, num_q_rows=100, num_kv_heads=2, num_splits=(1, 1, 2, 4, 8))
LARGE = Limits(
    num_rows=9, stretch=8, num_q_rows=3000, num_kv_heads=4, num_splits=(1, 2, 4, 8, 16, 32)
)


def sample(kind: str, num_cases: int, dtypes: list[torch.dtype], limits: Limits) -> list[Case]:
    """Draw cases that cover every head dimension, group and dtype."""
    draw = random.Random(kind)
    cases = []
    for seed in range(num_cases):
        group = GROUPS[seed % len(GROUPS)]
        rows = [draw_row(draw, kind, limits, group) for _ in range(limits.num_rows)]
        rows[draw.randrange(len(rows))] = (0, 0)
        case = Case(
            tuple(rows),
            group=group,
            num_kv_heads=draw.randint(1, limits.num_kv_heads),
            head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)],
            block_size=draw.choice(BLOCK_SIZES),
            dtype=dtypes[seed % len(dtypes)],
            window=draw.choice((None, None, 1, 20, 70)),
            softcap=None if kind == "tma" else draw.choice((None, None, 1.5)),
            has_sinks=kind in ("decode", "prefill") and seed % 3 == 0,
            num_splits=draw.choice(limits.num_splits),
            is_nan=draw.random() < 0.5,
            is_ordered=draw.random() < 0.5,
            seed=seed,
        )
        cases.append(CHANGES[kind](case, seed) if kind in CHANGES else case)
    return cases


def as_prefill(case: Case, seed: int) -> Case:
    """Use splits of 32 keys in half of the split cases."""
    config = AttentionConfig((16, 32)[seed % 4 // 2], 32, num_warps=4, num_stages=2, min_split=32)
    if case.num_splits == 1 or seed % 2:
        return replace(case, num_splits=1)
    return replace(case, config=config)


def as_shared(case: Case, seed: int) -> Case:
    return replace(case, window=None, num_shared=1 + seed % 3)


def as_tma(case: Case, seed: int) -> Case:
    """Return the same rows in a shape that the TMA kernel supports."""
    dtype = torch.float16 if case.dtype == torch.float32 else case.dtype
    sizes = {"head_dim": (64, 128)[seed % 2], "block_size": (64, 128, 256)[seed % 3]}
    return replace(case, dtype=dtype, window=None, **sizes)


CHANGES = {"prefill": as_prefill, "shared": as_shared, "tma": as_tma}


def draw_row(draw: random.Random, kind: str, limits: Limits, group: int) -> tuple[int, int]:
    length = draw.choice(EDGES) * draw.randint(1, limits.stretch)
    if kind in ("decode", "shared"):
        return length - 1, 1
    count = draw.choice((1, length, draw.randint(1, length)))
    count = min(count, -(-limits.num_q_rows // group))
    return length - count, count


def edge_cases(kind: str) -> list[Case]:
    """Return cases at every boundary of a tile, with other tile sizes than the defaults."""
    if kind == "decode":
        whole = Case(tuple((length - 1, 1) for length in EDGES[::2]), num_kv_heads=1)
        tiny = AttentionConfig(16, tile=16, num_warps=2, num_stages=2, min_split=16)
        wide = AttentionConfig(16, tile=64, num_warps=4, num_stages=2, min_split=64)
        return [
            replace(whole, block_size=16),
            replace(whole, block_size=48, num_splits=4, config=tiny),
            replace(whole, block_size=48, num_splits=2, config=wide, window=33),
            replace(whole, dtype=torch.float16, num_splits=8),
            replace(whole, block_size=16, num_splits=4, config=tiny, softcap=0.5, window=40),
            replace(whole, block_size=48, num_splits=4, config=tiny, has_sinks=True),
            Case(((600, 1),), num_splits=32, has_sinks=True),
            Case(((0, 0),) * 3, num_splits=4, has_sinks=True),
            Case(((0, 0), (0, 1))),
        ]
    if kind == "shared":
        rows = (*((length - 1, 1) for length in EDGES[::2]), (0, 0))
        several = Case(rows, num_kv_heads=1, block_size=16, num_shared=2)
        small = AttentionConfig(q_rows=16, tile=16, num_warps=4, num_stages=2, pairs=1)
        return [
            several,
            replace(several, block_size=48, num_splits=4),
            replace(several, num_shared=100),
            replace(several, block_size=48, softcap=0.5),
            replace(several, config=small, num_shared=3, group=7),
        ]
    chunks = Case(((0, 33), (31, 1), (17, 30), (0, 0), (64, 2), (0, 16)))
    if kind == "tma":
        half = replace(chunks, dtype=torch.float16, block_size=64)
        narrow = replace(TMA_CONFIG, q_rows=16, tile=16, num_warps=4, pairs=3)
        return [
            half,
            replace(half, config=narrow, block_size=16),
            replace(half, config=narrow, group=7, head_dim=128),
            replace(half, config=narrow, group=16, num_kv_heads=1),
            Case(((0, 64), (64, 64), (0, 65), (63, 66)), dtype=torch.float16, block_size=64),
            Case(((0, 0),) * 2, dtype=torch.float16, block_size=64),
        ]
    small = AttentionConfig(q_rows=16, tile=16, num_warps=2, num_stages=2, pairs=3)
    wide = AttentionConfig(q_rows=64, tile=64, num_warps=4, num_stages=2, pairs=1)
    return [
        replace(chunks, config=small),
        replace(chunks, config=small, window=5, group=3, block_size=48),
        replace(chunks, config=wide, window=40, block_size=16),
        replace(chunks, config=wide, dtype=torch.float16, group=7),
        replace(chunks, config=small, num_kv_heads=1, group=20),
        replace(chunks, config=small, softcap=0.5),
        replace(chunks, config=small, window=5, has_sinks=True),
        # The last tile of a CTA's keys is full, but its queries attend to only a part of it.
        Case(((0, 70), (40, 90)), block_size=16, config=replace(wide, q_rows=16), is_nan=True),
        Case(((0, 0),) * 2),
        replace(chunks, config=replace(small, min_split=16), num_splits=4, block_size=16),
        replace(chunks, config=replace(small, min_split=32), num_splits=2, window=40, group=3),
        Case(((300, 20), (0, 0), (90, 3)), config=replace(wide, min_split=64), num_splits=8),
    ]


def main(which: str) -> None:
    """Run "some" cases, drawn at random, or the "rest" and those at the limits of every kernel."""
    torch.set_num_threads(1)
    dtypes = [torch.float32, torch.float32, torch.float16]
    for turn, kind in enumerate(KINDS):
        drawn = sample(kind, len(GROUPS), dtypes, SMALL)
        some = drawn[turn :: len(KINDS)]  # covers all groups
        rest = [case for case in drawn if case not in some]
        of_codes = () if kind == "tma" else drawn if which == "rest" else some[:1]
        fp8 = [replace(case, is_fp8=True) for case in of_codes]
        for case in fp8 + (some if which == "some" else rest + edge_cases(kind)):
            start = time.process_time()
            print(kind, case, flush=True)
            verify(case, kind, "cpu")
            print(f"    {time.process_time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
