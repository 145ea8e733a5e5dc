"""Attention over a paged KV cache in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Return attention over a paged cache for rows of any number of queries, in a dtype."""
    window, out = spec.window, torch.zeros_like(q)
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    columns = (slots, query_starts, query_lens, context_lens)
    for slot, start, count, length in zip(*(c.tolist() for c in columns), strict=True):
        if count == 0 or length == 0:
            continue
        queries = torch.arange(length - count, length, device=q.device)[:, None]
        first = 0 if window is None else max(0, length - count - window + 1)
        keys = torch.arange(first, length, device=q.device)
        block_ids = block_table[slot, keys // block_size].long()
        k = k_cache[block_ids, keys % block_size].repeat_interleave(group, dim=1)
        v = v_cache[block_ids, keys % block_size].repeat_interleave(group, dim=1)
        is_seen = keys <= queries
        if window is not None:
            is_seen &= keys > queries - window
        scores = torch.einsum("qhd,khd->hqk", q[start : start + count], k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if spec.sinks is not None:
            scores = torch.cat(
                (scores, spec.sinks.to(scores.dtype)[:, None, None].expand(-1, count, 1)), -1
            )
        weights = scores.softmax(-1)[..., : len(k)]
        out[start : start + count] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
