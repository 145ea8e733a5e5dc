"""The two functions of flash-attn 2 for paged caches, in plain torch, with its input checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [blocks, block_size, kv_heads, dim]
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> Tensor:
    assert causal
    assert len(q) > 0
    assert block_table is not None
    check(q, k, block_table, cu_seqlens_q, cu_seqlens_k)
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    query_lens, context_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max_seqlen_q >= max(query_lens)
    assert max_seqlen_k >= max(context_lens)
    rest = softmax_scale, window_size, softcap
    rows = zip(q.split(query_lens), context_lens, block_table, strict=True)
    return torch.cat(
        [attend_row(query, length, k, v, table, *rest) for query, length, table in rows]
    )


def flash_attn_with_kvcache(
    q: Tensor,  # [rows, queries, heads, dim]
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    assert causal
    assert cache_seqlens is not None
    assert block_table is not None
    check(q, k_cache, block_table, cache_seqlens)
    assert len(cache_seqlens) == len(block_table) == len(q)
    rest = softmax_scale, window_size, softcap
    rows = zip(q, cache_seqlens.tolist(), block_table, strict=True)
    return torch.stack(
        [attend_row(query, length, k_cache, v_cache, table, *rest) for query, length, table in rows]
    )


def check(q: Tensor, k_cache: Tensor, block_table: Tensor, *lengths: Tensor) -> None:
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert k_cache.shape[1] % 256 == 0
    for tensor in (block_table, *lengths):
        assert tensor.dtype == torch.int32
    for tensor in lengths:
        assert tensor.is_contiguous()


def attend_row(
    query: Tensor,
    length: int,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Attend causally, with the last query at the last key; a row without keys gives zeros."""
    assert window[1] in (-1, 0)
    if length == 0:
        return torch.zeros_like(query)
    num_blocks = -(-length // k_cache.shape[1])
    assert num_blocks <= len(table)
    k, v = (cache[table[:num_blocks].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
    is_visible = torch.ones(len(query), length).tril(length - len(query))
    if window[0] >= 0:
        is_visible = is_visible.triu(length - len(query) - window[0])
    q, k, v = (heads.transpose(0, 1) for heads in (query, k, v))
    if softcap > 0:
        assert scale is not None
        scores = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * scale
        scores = softcap * (scores / softcap).tanh()
        weights = scores.masked_fill(~is_visible.bool(), -torch.inf).softmax(-1)
        return (weights @ v.repeat_interleave(len(q) // len(v), 0)).transpose(0, 1)
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=is_visible.bool(), scale=scale, enable_gqa=True
    )
    return output.transpose(0, 1)
