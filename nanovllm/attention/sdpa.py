"""Attention in plain torch, on any device: SDPA over each row's context, one row at a time.

SDPA supports neither softcapping nor sinks: layers with these use separate matmuls and softmax.

Each kv head is broadcast to its query heads, so grouped-query attention does not copy k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec, BatchRows
from nanovllm.ops.composed_linear import upcast
from nanovllm.ops.fp8 import Fp8Rows, dequantize
from nanovllm.ops.interface import LayerCache

QUERY_TILE = 512  # queries per masked call; this bounds the memory of the mask


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of the batch: tokens [offset : offset + count] follow `start` cached tokens."""

    offset: int
    count: int
    start: int
    block_ids: Tensor  # [groups, blocks]


class SdpaAttention:
    def __init__(self, block_size: int, matmul_dtype: torch.dtype | None = None) -> None:
        self.block_size = block_size
        self.matmul_dtype = matmul_dtype  # None: the dtype of the cache

    def plan(self, rows: BatchRows) -> list[PrefillRow]:
        offsets = np.cumsum(rows.counts) - rows.counts
        return [plan_row(rows, i, offsets, self.block_size) for i in range(len(offsets))]

    def attend(
        self, q: Tensor, cache: LayerCache, plan: list[PrefillRow], spec: AttentionSpec
    ) -> Tensor:
        output = torch.empty_like(q)
        for row in plan:
            attend_prefill(q, cache, row, spec, output, self.matmul_dtype)
        return output


def plan_row(rows: BatchRows, i: int, offsets: np.ndarray, block_size: int) -> PrefillRow:
    """Describe row i; `offsets` holds the index of each row's first token in the batch."""
    start, count = int(rows.starts[i]), int(rows.counts[i])
    num_blocks = -(-(start + count) // block_size)
    block_ids = rows.block_tables[int(rows.slots[i]), :, :num_blocks].long()
    return PrefillRow(int(offsets[i]), count, start, block_ids)


def attend_prefill(
    q: Tensor,
    cache: LayerCache,
    row: PrefillRow,
    spec: AttentionSpec,
    output: Tensor,
    matmul_dtype: torch.dtype | None = None,
) -> None:
    """Write to `output` the attention of a row's last `count` tokens over its context or window."""
    part = slice(row.offset, row.offset + row.count)
    q, output = q[part], output[part]
    length = row.start + row.count
    gathered = _gather(cache, row.block_ids[cache.group], q.dtype)
    k, v = (part[:, :, :length] for part in gathered)
    q, k, v = upcast(q, k, v, dtype=matmul_dtype)
    window = length if spec.window is None else spec.window
    is_plain = spec.softcap is None and spec.sinks is None
    if row.start == 0 and length <= window and is_plain:
        output[:] = _grouped_sdpa(q, k, v, None, spec)
        return
    positions = torch.arange(length, device=q.device)
    num_later = 0 if spec.is_causal else window - 1  # visible keys after the query's position
    for first in range(0, row.count, QUERY_TILE):
        tile = q[first : first + QUERY_TILE]
        start = row.start + first
        queries = positions[start : start + len(tile), None]
        begin, end = max(start - window + 1, 0), start + len(tile) + num_later
        keys = positions[begin:end]
        is_visible = (keys <= queries + num_later) & (keys > queries - window)
        values = _grouped_sdpa(tile, k[:, :, begin:end], v[:, :, begin:end], is_visible, spec)
        output[first : first + QUERY_TILE] = values


def _gather(cache: LayerCache, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of the cache, each as [1, kv_heads, tokens, head_dim]."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    parts = (cache.k, cache.k_exponents), (cache.v, cache.v_exponents)
    blocks = (_gather_blocks(*part, block_ids, dtype) for part in parts)
    k, v = (each.view(1, -1, num_kv_heads, head_dim).transpose(1, 2) for each in blocks)
    return k, v


def _gather_blocks(
    cached: Tensor, exponents: Tensor | None, block_ids: Tensor, dtype: torch.dtype
) -> Tensor:
    if exponents is None:
        return cached.flatten(1).index_select(0, block_ids)
    values = cached.view(torch.uint8).flatten(1).index_select(0, block_ids).view(cached.dtype)
    values = values.view(-1, *cached.shape[1:])  # [blocks, block_size, kv_heads, head_dim]
    by_token = exponents.index_select(0, block_ids).transpose(1, 2)
    return dequantize(Fp8Rows(values, by_token), dtype)


def _grouped_sdpa(
    q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Run SDPA of q [queries, heads, dim] over k, v [1, kv_heads, tokens, dim].

    Without a mask, attention is causal if `spec.is_causal` is set, and over all keys otherwise.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    # kv heads become the batch dimension; `expand` broadcasts them without a copy.
    groups = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    size = groups.shape[1]
    k = k.transpose(0, 1).expand(-1, size, -1, -1)
    v = v.transpose(0, 1).expand(-1, size, -1, -1)
    if spec.softcap is not None or spec.sinks is not None:
        output = _composed_attention(groups, k, v, is_visible, spec)
    else:
        output = F.scaled_dot_product_attention(
            groups,
            k,
            v,
            attn_mask=is_visible,
            is_causal=spec.is_causal and is_visible is None,
            scale=spec.scale,
        )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _composed_attention(
    q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Compute attention with a softcap or sinks, for q [kv_heads, group, queries, dim]."""
    assert is_visible is not None
    scores = (q @ k.transpose(-1, -2)).float() * spec.scale
    if (cap := spec.softcap) is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(*q.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v
