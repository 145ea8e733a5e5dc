"""Attention on the CPU: torch's SDPA over blocks gathered from the paged cache.

Rows with one token are padded and run together; query heads that share a kv head are
seen as query positions, so grouped-query attention copies nothing. Longer rows run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionSpec, BatchRows
from nanovllm.kernels.fp8_rows import Fp8Rows, dequantise
from nanovllm.kernels.ops import LayerCache
from nanovllm.kernels.torch_ops import upcast

MAX_WASTE = 1024  # padding tokens per group; beyond that a second SDPA call is cheaper
QUERY_TILE = 512  # queries per call when a mask is needed, which bounds the mask's memory


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token rows of similar length."""

    tokens: Tensor | None  # indices into the batch; None: the whole batch in order
    block_ids: Tensor  # [rows * width], padded with block 0
    is_seen: Tensor  # [rows, 1, 1, width * block_size], whether a position is in the context
    starts: Tensor  # [rows, 1, 1, 1], the position of each one's token


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several tokens: batch[offset : offset + count] continues `start` cached tokens."""

    offset: int
    count: int
    start: int
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class CpuPlan:
    groups: list[DecodeGroup]
    prefills: list[PrefillRow]


class CpuAttention:
    def __init__(self, block_size: int, product_dtype: torch.dtype | None = None) -> None:
        self.block_size = block_size
        self.product_dtype = product_dtype  # None: that of the cache

    def plan(self, rows: BatchRows) -> CpuPlan:
        offsets = np.cumsum(rows.counts) - rows.counts
        tables = rows.block_table.numpy()
        singles = np.flatnonzero(rows.counts == 1)
        lengths = rows.starts[singles] + 1
        groups = [
            self._decode_group(rows, tables, offsets, singles[members])
            for members in _group_by_length(lengths)
        ]
        return CpuPlan(groups, plan_prefills(rows, offsets, self.block_size))

    def attend(self, q: Tensor, cache: LayerCache, plan: CpuPlan, spec: AttentionSpec) -> Tensor:
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._decode(q, cache, plan.groups[0], spec)
        output = torch.empty_like(q)
        for group in plan.groups:
            output[group.tokens] = self._decode(q[group.tokens], cache, group, spec)
        for row in plan.prefills:
            attend_prefill(q, cache, row, spec, output, self.product_dtype)
        return output

    def _decode_group(
        self, rows: BatchRows, tables: np.ndarray, offsets: np.ndarray, members: np.ndarray
    ) -> DecodeGroup:
        starts = rows.starts[members]
        width = int(starts.max()) // self.block_size + 1
        block_ids = tables[rows.slots[members], :width].astype(np.int64)
        block_ids[np.arange(width) > (starts // self.block_size)[:, None]] = 0
        is_seen = np.arange(width * self.block_size) <= starts[:, None]
        is_whole_batch = len(members) == len(rows.counts)
        order = np.arange(len(members))
        tokens = offsets[members].astype(np.int64)
        return DecodeGroup(
            None if is_whole_batch and (members == order).all() else torch.from_numpy(tokens),
            torch.from_numpy(block_ids.reshape(-1)),
            torch.from_numpy(is_seen)[:, None, None, :],
            torch.from_numpy(starts)[:, None, None, None],
        )

    def _decode(
        self, q: Tensor, cache: LayerCache, group: DecodeGroup, spec: AttentionSpec
    ) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = cache.k.shape[2]
        k, v = _gather(cache, group.block_ids, num_rows, q.dtype)
        # A hidden position adds 0 * v: what another sequence left there may be NaN.
        is_seen = group.is_seen
        is_hidden = ~is_seen.transpose(2, 3)  # [rows, 1, width, 1]
        k, v = k.masked_fill(is_hidden, 0.0), v.masked_fill(is_hidden, 0.0)
        grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if spec.window is not None:
            is_seen = is_seen & (torch.arange(is_seen.shape[-1]) > group.starts - spec.window)
        grouped, k, v = upcast(grouped, k, v, dtype=self.product_dtype)
        output = F.scaled_dot_product_attention(grouped, k, v, attn_mask=is_seen, scale=spec.scale)
        return output.reshape(num_rows, num_heads, head_dim).to(q.dtype)


def plan_prefills(rows: BatchRows, offsets: np.ndarray, block_size: int) -> list[PrefillRow]:
    """Describe the rows of more than one token; `offsets` says where each begins in the batch."""
    longer = np.flatnonzero(rows.counts != 1).tolist()
    return [plan_row(rows, i, offsets, block_size) for i in longer]


def plan_row(rows: BatchRows, i: int, offsets: np.ndarray, block_size: int) -> PrefillRow:
    start, count = int(rows.starts[i]), int(rows.counts[i])
    num_blocks = -(-(start + count) // block_size)
    block_ids = rows.block_table[int(rows.slots[i]), :num_blocks].long()
    return PrefillRow(int(offsets[i]), count, start, block_ids)


def attend_prefill(
    q: Tensor,
    cache: LayerCache,
    row: PrefillRow,
    spec: AttentionSpec,
    output: Tensor,
    product_dtype: torch.dtype | None = None,
) -> None:
    """Attend from the last `count` positions of a row to all of it, or what the window shows."""
    part = slice(row.offset, row.offset + row.count)
    q, output = q[part], output[part]
    length = row.start + row.count
    k, v = (part[:, :, :length] for part in _gather(cache, row.block_ids, 1, q.dtype))
    q, k, v = upcast(q, k, v, dtype=product_dtype)
    window = length if spec.window is None else spec.window
    if row.start == 0 and length <= window:
        output[:] = _grouped_sdpa(q, k, v, None, spec.scale)
        return
    positions = torch.arange(length, device=q.device)
    for first in range(0, row.count, QUERY_TILE):
        tile = q[first : first + QUERY_TILE]
        start = row.start + first
        end, begin = start + len(tile), max(start - window + 1, 0)
        keys, queries = positions[begin:end], positions[start:end, None]
        is_visible = (keys <= queries) & (keys > queries - window)
        values = _grouped_sdpa(tile, k[:, :, begin:end], v[:, :, begin:end], is_visible, spec.scale)
        output[first : first + QUERY_TILE] = values


def _group_by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Split rows into groups, longest first, so that no group pads more than MAX_WASTE tokens."""
    order = np.argsort(-lengths, kind="stable")
    groups, first, waste = [], 0, 0
    for i, row in enumerate(order):
        waste += int(lengths[order[first]] - lengths[row])
        if waste > MAX_WASTE:
            groups.append(np.sort(order[first:i]))
            first, waste = i, 0
    return [*groups, np.sort(order[first:])] if len(order) else []


def _gather(
    cache: LayerCache, block_ids: Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of the cache, each as [rows, kv_heads, tokens, head_dim]."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    parts = (cache.k, cache.k_exponents), (cache.v, cache.v_exponents)
    blocks = (_gather_blocks(*part, block_ids, dtype) for part in parts)
    k, v = (each.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2) for each in blocks)
    return k, v


def _gather_blocks(
    cached: Tensor, exponents: Tensor | None, block_ids: Tensor, dtype: torch.dtype
) -> Tensor:
    if exponents is None:
        return cached.flatten(1).index_select(0, block_ids)
    codes = cached.view(torch.uint8).flatten(1).index_select(0, block_ids).view(cached.dtype)
    codes = codes.view(-1, *cached.shape[1:])  # [blocks, block_size, kv_heads, head_dim]
    by_token = exponents.index_select(0, block_ids).transpose(1, 2)
    return dequantise(Fp8Rows(codes, by_token), dtype)


def _grouped_sdpa(
    q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor | None, scale: float
) -> Tensor:
    """SDPA of q [queries, heads, dim] over k, v [1, kv_heads, tokens, dim]; None means causal."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    # kv heads become the batch and each is broadcast over its query heads: a view, not a copy.
    groups = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    size = groups.shape[1]
    k = k.transpose(0, 1).expand(-1, size, -1, -1)
    v = v.transpose(0, 1).expand(-1, size, -1, -1)
    output = F.scaled_dot_product_attention(
        groups, k, v, attn_mask=is_visible, is_causal=is_visible is None, scale=scale
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
