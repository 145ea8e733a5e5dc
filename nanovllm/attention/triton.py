"""Attention on CUDA: Triton kernels straight over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionSpec, BatchRows, DecodeRows, LayerCache, SharedRows
from nanovllm.kernels.cuda.attention_decode import choose_splits, paged_decode
from nanovllm.kernels.cuda.attention_prefill import (
    attend_shared,
    choose_prefill_splits,
    paged_prefill,
    prefill_config,
)
from nanovllm.kernels.cuda.attention_splits import partial_size
from nanovllm.kernels.cuda.attention_tma import suits_tma, tma_prefill
from nanovllm.platforms.base import Platform


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of one token; their tables are lines `slots` of the block table."""

    slots: Tensor
    context_lens: Tensor
    query_index: Tensor | None  # their tokens in the batch; None: row i is token i
    order: Tensor | None  # to start them in; None: as they come
    max_context: int  # an upper bound, known to the host
    shared: SharedRows | None = None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    slots: Tensor
    query_starts: Tensor
    query_lens: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context: int  # an upper bound, known to the host


@dataclass(frozen=True, slots=True)
class TritonPlan:
    block_table: Tensor
    decode: SingleRows | None
    prefill: PrefillRows | None


class TritonAttention:
    def __init__(self, platform: Platform, num_processors: int, has_tma: bool = False) -> None:
        self.platform = platform
        self.num_processors = num_processors
        self.has_tma = has_tma

    def plan(self, rows: BatchRows, dtype: torch.dtype) -> TritonPlan:
        """Split the rows by kind and send their columns in one copy."""
        starts = np.cumsum(rows.counts) - rows.counts
        ends = rows.starts + rows.counts
        columns = np.stack((rows.slots, starts, rows.counts, ends)).astype(np.int32)
        is_single = rows.counts == 1
        num_single = int(is_single.sum())
        order = np.argsort(~is_single, kind="stable")
        sent = self.platform.upload(columns[:, order])
        slots, query_starts, query_lens, context_lens = sent
        decode = prefill = None
        if num_single:
            decode = SingleRows(
                slots[:num_single],
                context_lens[:num_single],
                query_starts[:num_single],
                None,
                int(ends[is_single].max()),
            )
        if num_single < len(rows.slots):
            prefill = PrefillRows(
                slots[num_single:],
                query_starts[num_single:],
                query_lens[num_single:],
                context_lens[num_single:],
                int(rows.counts.max()),
                int(ends[~is_single].max()),
            )
        return TritonPlan(rows.block_table, decode, prefill)

    def decode_plan(self, rows: DecodeRows) -> TritonPlan:
        single = SingleRows(
            rows.slots, rows.context_lens, None, rows.order, rows.max_context, rows.shared
        )
        return TritonPlan(rows.block_table, single, None)

    def chunk_plan(
        self,
        block_table: Tensor,
        singles: Tensor,
        prompts: Tensor,
        max_context: int,
        max_query_len: int,
    ) -> TritonPlan:
        """Plan rows of one token and rows of any number, from device tensors alone.

        singles [3, rows] has each one's slot, token and context length, 0 being padding, for which
        zeros are written; prompts [4, rows] slot, first token, number of tokens, which may be 0,
        and context length.
        """
        decode = None
        if singles.shape[1]:
            slots, tokens, context_lens = singles
            decode = SingleRows(slots, context_lens, tokens, None, max_context)
        slots, query_starts, query_lens, context_lens = prompts
        prefill = PrefillRows(
            slots, query_starts, query_lens, context_lens, max_query_len, max_context
        )
        return TritonPlan(block_table, decode, prefill)

    def attend(self, q: Tensor, cache: LayerCache, plan: TritonPlan, spec: AttentionSpec) -> Tensor:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        if plan.decode is not None:  # first: rows that are padding may write to a prompt's token
            self._decode(q, cache, plan.block_table, plan.decode, spec, out)
        if plan.prefill is not None:
            self._prefill(q, cache, plan.block_table, plan.prefill, spec, out)
        return out

    def _prefill(
        self,
        q: Tensor,
        cache: LayerCache,
        block_table: Tensor,
        rows: PrefillRows,
        spec: AttentionSpec,
        out: Tensor,
    ) -> None:
        columns = rows.slots, rows.query_starts, rows.query_lens, rows.context_lens
        tables = q, cache.k, cache.v, block_table, *columns, rows.max_query_len, out
        if self.has_tma and suits_tma(q, cache.k, rows.max_query_len, spec.window):
            tma_prefill(*tables, spec.scale)
            return
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = cache.k.shape[2]
        group = num_heads // num_kv_heads
        config = prefill_config(head_dim, q.dtype, rows.max_query_len * group)
        max_keys = min(rows.max_context, (spec.window or rows.max_context) + rows.max_query_len)
        num_splits = choose_prefill_splits(
            num_tokens * group, num_kv_heads, config, max_keys, self.num_processors
        )
        paged_prefill(*tables, spec.scale, spec.window, num_splits, config)

    def _decode(
        self,
        q: Tensor,
        cache: LayerCache,
        block_table: Tensor,
        rows: SingleRows,
        spec: AttentionSpec,
        out: Tensor,
    ) -> None:
        num_rows, num_kv_heads = len(rows.slots), cache.k.shape[2]
        _, num_heads, head_dim = q.shape
        max_keys = min(rows.max_context, spec.window or rows.max_context)
        num_splits = choose_splits(num_rows, num_kv_heads, max_keys, self.num_processors)
        size = partial_size(num_rows, num_heads, head_dim, num_splits)
        partial = torch.empty(size, device=q.device, dtype=torch.float32)
        lens = begun = None
        if rows.shared is not None and spec.window is None:
            groups, members, lens = rows.shared.groups, rows.shared.members, rows.shared.lens
            begun = torch.empty(len(q) * num_heads * (head_dim + 2), device=q.device)
            attend_shared(q, cache.k, cache.v, block_table, groups, members, begun, spec.scale)
        paged_decode(
            q,
            cache.k,
            cache.v,
            block_table,
            rows.slots,
            rows.context_lens,
            rows.query_index,
            out,
            spec.scale,
            spec.window,
            num_splits,
            partial,
            rows.order,
            lens,
            begun,
        )
