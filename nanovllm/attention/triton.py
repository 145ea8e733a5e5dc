"""Attention on CUDA: Triton kernels straight over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionSpec, BatchRows, DecodeRows, SharedRows
from nanovllm.devices.base import Device
from nanovllm.kernels.cuda.attention_decode import (
    SharedPart,
    SingleRows,
    choose_splits,
    decode_config,
    paged_decode,
    suits_large_tiles,
)
from nanovllm.kernels.cuda.attention_prefill import (
    PrefillRows,
    attend_shared,
    choose_prefill_splits,
    paged_prefill,
    prefill_config,
    with_more_stages,
)
from nanovllm.kernels.cuda.attention_tiles import PagedCache
from nanovllm.kernels.cuda.attention_tma import suits_tma, tma_prefill
from nanovllm.kernels.ops import LayerCache


@dataclass(frozen=True, slots=True)
class TritonPlan:
    block_table: Tensor
    decode: SingleRows | None
    prefill: PrefillRows | None
    shared: SharedRows | None = None  # of the rows of one token
    max_context: int | None = None  # of these; None: what the table has room for


class TritonAttention:
    def __init__(self, device: Device, num_processors: int, is_hopper: bool = False) -> None:
        self.device = device
        self.num_processors = num_processors
        self.is_hopper = is_hopper

    def plan(self, rows: BatchRows) -> TritonPlan:
        """Split the rows by kind and send their columns in one copy."""
        starts = np.cumsum(rows.counts) - rows.counts
        ends = rows.starts + rows.counts
        columns = np.stack((rows.slots, starts, rows.counts, ends)).astype(np.int32)
        is_single = rows.counts == 1
        num_single = int(is_single.sum())
        order = np.argsort(~is_single, kind="stable")
        sent = self.device.upload(columns[:, order])
        slots, query_starts, query_lens, context_lens = sent
        decode = prefill = None
        if num_single:
            decode = SingleRows(
                slots[:num_single], context_lens[:num_single], query_starts[:num_single]
            )
        if num_single < len(rows.slots):
            prefill = PrefillRows(
                slots[num_single:],
                query_starts[num_single:],
                query_lens[num_single:],
                context_lens[num_single:],
                int(rows.counts.max()),
            )
        return TritonPlan(rows.block_table, decode, prefill)

    def decode_plan(self, rows: DecodeRows) -> TritonPlan:
        single = SingleRows(rows.slots, rows.context_lens, order=rows.order)
        return TritonPlan(rows.block_table, single, None, rows.shared, rows.max_context)

    def chunk_plan(
        self, block_table: Tensor, singles: Tensor, prompts: Tensor, max_query_len: int
    ) -> TritonPlan:
        """Plan rows of one token and rows of any number, from device tensors alone.

        singles [3, rows] has each one's slot, token and context length, 0 being padding, for which
        zeros are written; prompts [4, rows] slot, first token, number of tokens, which may be 0,
        and context length.
        """
        decode = None
        if singles.shape[1]:
            slots, tokens, context_lens = singles
            decode = SingleRows(slots, context_lens, tokens)
        slots, query_starts, query_lens, context_lens = prompts
        prefill = PrefillRows(slots, query_starts, query_lens, context_lens, max_query_len)
        return TritonPlan(block_table, decode, prefill)

    def attend(self, q: Tensor, cache: LayerCache, plan: TritonPlan, spec: AttentionSpec) -> Tensor:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        exponents: tuple[Tensor, Tensor] | tuple[()] = ()
        if cache.k_exponents is not None and cache.v_exponents is not None:
            exponents = cache.k_exponents, cache.v_exponents
        paged = PagedCache(cache.k, cache.v, plan.block_table, exponents)
        if plan.decode is not None:  # first: rows that are padding may write to a prompt's token
            self._decode(q, paged, plan, spec, out)
        if plan.prefill is not None:
            self._prefill(q, paged, plan.prefill, spec, out)
        return out

    def _prefill(
        self, q: Tensor, cache: PagedCache, rows: PrefillRows, spec: AttentionSpec, out: Tensor
    ) -> None:
        if self.is_hopper and suits_tma(q, cache, rows.max_query_len, spec.window):
            tma_prefill(q, cache, rows, out, spec.scale)
            return
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = cache.k.shape[2]
        group = num_heads // num_kv_heads
        num_q_rows = rows.max_query_len * group
        config = prefill_config(head_dim, q.dtype, num_q_rows, cache.has_codes)
        max_keys = cache.max_context
        if spec.window is not None:
            max_keys = min(max_keys, spec.window + rows.max_query_len)
        num_splits = choose_prefill_splits(
            num_tokens * group, num_kv_heads, config, max_keys, self.num_processors
        )
        if self.is_hopper and num_splits == 1:
            config = with_more_stages(config)
        paged_prefill(q, cache, rows, out, spec.scale, spec.window, num_splits, config)

    def _decode(
        self, q: Tensor, cache: PagedCache, plan: TritonPlan, spec: AttentionSpec, out: Tensor
    ) -> None:
        """Split by what contexts may be, not are, so that eager steps use kernels of graphs."""
        rows, shared = plan.decode, plan.shared
        assert rows is not None
        max_context = plan.max_context or cache.max_context
        max_keys = min(max_context, spec.window or max_context)
        num_rows, num_kv_heads = len(rows.slots), cache.k.shape[2]
        num_splits = choose_splits(num_rows, num_kv_heads, max_keys, self.num_processors)
        is_large = self.is_hopper and suits_large_tiles(num_rows, num_kv_heads, num_splits)
        config = decode_config(q.shape[2], q.dtype, is_large, cache.has_codes)
        part = None
        if shared is not None and spec.window is None:
            parts = attend_shared(q, cache, shared.groups, shared.members, spec.scale)
            part = SharedPart(shared.lens, parts)
        paged_decode(q, cache, rows, out, spec.scale, spec.window, num_splits, part, config)
