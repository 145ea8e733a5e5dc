"""Batches with rows of many kinds over a paged cache, and their expected attention outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, AttentionSpec, BatchRows
from nanovllm.attention.sdpa import QUERY_TILE
from nanovllm.ops.fp8 import dequantize, hadamard_exponents, hadamard_transform, quantize
from nanovllm.ops.interface import LayerCache, Ops

GARBAGE = 1e30  # finite, like values that a block's previous owner left
HEAD_DIM = 16  # the default
USUAL = AttentionSpec(HEAD_DIM**-0.5)
Rows = list[tuple[int, int]]  # (start, count)


def make_mixes(tile: int) -> dict[str, Rows]:
    """Return batches by what is special about them; `tile` is SDPA's number of queries per call."""
    return {
        "one decode": [(40, 1)],
        "one single-token prompt": [(0, 1)],
        "single-token prompts": [(0, 1)] * 5,
        "equal decodes": [(63, 1)] * 4,
        "decodes around block borders": [(p, 1) for p in (14, 15, 16, 17, 31, 32, 47, 48, 49)],
        "decodes of very different lengths": [(n, 1) for n in (3, 900, 0, 1000, 40, 870, 5, 1200)],
        "prefill": [(0, 50)],
        "prefills": [(0, 7), (0, 16), (0, 48), (0, 2)],
        "chunk after a prefix": [(32, 20)],
        "chunk inside a block": [(5, 3), (19, 40)],
        "chunk over several tiles": [(24, 2 * tile + 3)],
        "long prefill": [(0, tile + 9)],
        "everything": [(7, 1), (0, 33), (900, 1), (48, 21), (0, 1), (0, 2), (16, 1), (31, 2)],
    }


MIXES = make_mixes(QUERY_TILE)


@dataclass(frozen=True)
class Backend:
    """An attention backend, and the ops that fill its cache."""

    ops: Ops
    attention: AttentionBackend


@dataclass(frozen=True)
class Case:
    """The tensors of a step, and the whole history of every row."""

    rows: BatchRows
    cache: LayerCache
    qkv: Tensor  # [tokens, q + k + v heads, dim]
    histories: list[tuple[Tensor, Tensor]]  # each row's k and v, [start + count, kv_heads, dim]
    spec: AttentionSpec = USUAL

    def run(self, backend: Backend) -> Tensor:
        plan = backend.attention.plan(self.rows)
        self.write(backend.ops)
        return backend.attention.attend(self.queries(), self.cache, plan, self.spec)

    def write(self, ops: Ops) -> None:
        """Store k and v as a layer does, with a rope that rotates by zero."""
        rope = torch.tensor([1.0, 0.0]).repeat_interleave(self.qkv.shape[2] // 2).view(1, 2, -1)
        positions = torch.zeros(len(self.qkv), dtype=torch.int64)
        cache, slots = self.cache, self.slot_mapping()
        ops.rope_write(self.qkv, None, rope, positions, cache, slots)

    def queries(self) -> Tensor:
        """Return the queries, as a view like in a layer."""
        return self.qkv[:, : -2 * self.cache.k.shape[2]]

    def slot_mapping(self) -> Tensor:
        block_size = self.cache.k.shape[1]
        slots = [
            table[position // block_size] * block_size + position % block_size
            for start, count, table in zip(
                self.rows.starts,
                self.rows.counts,
                self.rows.block_tables[:, 0].numpy(),
                strict=True,
            )
            for position in range(start, start + count)
        ]
        return torch.tensor(slots, dtype=torch.int64)

    def reference(self) -> Tensor:
        """Compute attention in float64, from every query to the history up to itself."""
        outputs = []
        queries = self.queries().double().split(self.rows.counts.tolist())
        for query, (k, v), start in zip(queries, self.histories, self.rows.starts, strict=True):
            size = query.shape[1] // k.shape[1]
            keys, values = (each.double().repeat_interleave(size, dim=1) for each in (k, v))
            ends = start + 1 + torch.arange(len(query)).unsqueeze(1)
            positions = torch.arange(len(k))
            is_seen = positions < ends
            if self.spec.window is not None:
                is_seen &= positions >= ends - self.spec.window
            scores = torch.einsum("qhd,thd->hqt", query, keys) * self.spec.scale
            if (cap := self.spec.softcap) is not None:
                scores = cap * (scores / cap).tanh()
            weights = scores.masked_fill(~is_seen, -torch.inf)
            if (sinks := self.spec.sinks) is not None:
                column = sinks.double()[:, None, None].expand(-1, len(query), 1)
                weights = torch.cat((weights, column), -1)
            weights = weights.softmax(-1)[..., : len(k)]
            outputs.append(torch.einsum("hqt,thd->qhd", weights, values))
        return torch.cat(outputs)


def in_eight_bits(case: Case) -> Case:
    """Return the same rows over an FP8 cache; their histories hold the dequantized values."""
    _, of_k = hadamard_exponents(case.qkv.shape[2])
    parts = [quantize(hadamard_transform(case.cache.k, of_k)), quantize(case.cache.v)]
    exponents = [part.exponents.transpose(1, 2).contiguous() for part in parts]
    cache = LayerCache(*(part.values for part in parts), *exponents)
    histories = [
        tuple(
            dequantize(quantize(part), torch.float64) for part in (hadamard_transform(k, of_k), v)
        )
        for k, v in case.histories
    ]
    return replace(case, cache=cache, histories=histories)


def batch_rows(starts: np.ndarray, counts: np.ndarray, tables: np.ndarray) -> BatchRows:
    """Return rows whose slots are the rows of `tables`, in order."""
    slots = np.arange(len(starts), dtype=np.int32)
    return BatchRows(slots, starts, counts, torch.from_numpy(np.ascontiguousarray(tables[:, None])))


def check_last_tokens(attention: AttentionBackend, mix: Rows, ops: Ops) -> None:
    """Check attention from the last token of some rows, of all rows and of none."""
    case = make_case(mix, block_size=256)
    want = case.run(Backend(ops, attention))
    ends = case.rows.counts.cumsum()
    for is_chosen in (np.arange(len(ends)) % 2 == 0, ends > 0, ends < 0):
        rows, counts = case.rows, case.rows.counts[is_chosen]
        starts = rows.starts[is_chosen] + counts - 1
        last = BatchRows(rows.slots[is_chosen], starts, np.ones_like(counts), rows.block_tables)
        plan = attention.plan(last)
        index = torch.from_numpy(ends[is_chosen] - 1).long()
        output = attention.attend(case.queries()[index], case.cache, plan, case.spec)
        torch.testing.assert_close(output, want[index], rtol=2e-5, atol=2e-5)


def make_case(
    mix: Rows,
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    unused: float = GARBAGE,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    seed: int = 0,
) -> Case:
    """Put random histories into shuffled blocks; the rest of the cache holds `unused`."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    starts, counts = np.array(mix, np.int32).T
    widths = -(-(starts + counts) // block_size)
    block_ids = rng.permutation(np.arange(1, widths.sum() + 4))  # block 0 stays unused
    tables = rng.integers(0, len(block_ids), (len(mix), widths.max() + 2)).astype(np.int32)
    shape = (len(block_ids) + 1, block_size, num_kv_heads, head_dim)
    cache = LayerCache(*(torch.full(shape, unused, dtype=dtype) for _ in range(2)))

    num_qkv_heads = num_heads + 2 * num_kv_heads
    qkv = torch.randn(int(counts.sum()), num_qkv_heads, head_dim, generator=generator).to(dtype)
    _, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    histories, first, offset = [], 0, 0
    for row, (start, count) in enumerate(mix):
        tables[row, : widths[row]] = block_ids[first : first + widths[row]]
        past = torch.randn(2, start, num_kv_heads, head_dim, generator=generator).to(dtype)
        positions = np.arange(start)
        blocks = torch.from_numpy(tables[row, positions // block_size].astype(np.int64))
        cache.k[blocks, torch.from_numpy(positions % block_size)] = past[0]
        cache.v[blocks, torch.from_numpy(positions % block_size)] = past[1]
        new = slice(offset, offset + count)
        histories.append((torch.cat((past[0], k[new])), torch.cat((past[1], v[new]))))
        first, offset = first + widths[row], offset + count
    sinks = torch.randn(num_heads, generator=generator).to(dtype) if has_sinks else None
    spec = AttentionSpec(scale or head_dim**-0.5, window, softcap, sinks)
    return Case(batch_rows(starts, counts, tables), cache, qkv, histories, spec)
