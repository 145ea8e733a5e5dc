"""Attention on CUDA: Triton kernels that read the paged KV cache directly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec, BatchRows, DecodeRows, SharedRows
from nanovllm.devices.cuda.kernels.attention_configs import (
    MAX_SMALL_TILE_ROWS,
    TMA_CONFIG,
    choose_large_tile,
    choose_prefill_splits,
    choose_splits,
    decode_config,
    prefill_config,
    suits_tma,
    with_more_stages,
)
from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache
from nanovllm.devices.cuda.kernels.paged_attention import (
    QueryRows,
    SharedPartials,
    attend_shared,
    paged_attention,
)
from nanovllm.ops.interface import LayerCache
from nanovllm.worker.device_interface import Device


@dataclass(frozen=True, slots=True)
class TritonPlan:
    block_tables: Tensor  # as in BatchRows
    decode: QueryRows | None
    prefill: QueryRows | None
    shared: SharedRows | None = None  # shared prefixes of the decode rows
    max_context: int | None = None  # maximum decode context; None: what the block table can hold


class TritonAttention:
    def __init__(self, device: Device, num_processors: int, is_hopper: bool = False) -> None:
        self.device = device
        self.num_processors = num_processors
        self.is_hopper = is_hopper

    def plan(self, rows: BatchRows) -> TritonPlan:
        """Separate decode from prefill rows, and send their columns to the device in one copy."""
        starts = np.cumsum(rows.counts) - rows.counts
        columns = np.stack((rows.slots, starts, rows.starts + rows.counts, rows.counts))
        is_decode = rows.counts == 1
        num_decodes = int(is_decode.sum())
        order = np.argsort(~is_decode, kind="stable")
        sent = self.device.upload(columns.astype(np.int32)[:, order])
        decodes, prompts = sent[:3, :num_decodes], sent[:, num_decodes:]
        return self.chunk_plan(rows.block_tables, decodes, prompts, int(rows.counts.max(initial=0)))

    def decode_plan(self, rows: DecodeRows) -> TritonPlan:
        decode = QueryRows(rows.slots, rows.context_lens, order=rows.order)
        return TritonPlan(rows.block_tables, decode, None, rows.shared, rows.max_context)

    def chunk_plan(
        self, block_tables: Tensor, decodes: Tensor, prompts: Tensor, max_query_len: int
    ) -> TritonPlan:
        """Plan decode rows and prefill rows whose sizes only the device knows.

        `decodes` [3, rows] holds slot, token index and context length. A context length of 0 marks
        padding, whose output is zeros. `prompts` [4, rows] holds slot, first token index, context
        length and number of tokens, which is 0 for padding.
        """
        decode = prefill = None
        if decodes.shape[1]:
            slots, tokens, context_lens = decodes
            decode = QueryRows(slots, context_lens, tokens)
        if prompts.shape[1]:
            slots, query_starts, context_lens, query_lens = prompts
            prefill = QueryRows(slots, context_lens, query_starts, query_lens, max_query_len)
        return TritonPlan(block_tables, decode, prefill)

    def attend(self, q: Tensor, cache: LayerCache, plan: TritonPlan, spec: AttentionSpec) -> Tensor:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        exponents: tuple[Tensor, Tensor] | tuple[()] = ()
        if cache.k_exponents is not None and cache.v_exponents is not None:
            exponents = cache.k_exponents, cache.v_exponents
        paged = PagedCache(cache.k, cache.v, plan.block_tables[:, cache.group], exponents)
        if plan.decode is not None:  # before prefill, which overwrites the output of padding rows
            self._decode(q, paged, plan, spec, out)
        if plan.prefill is not None:
            self._prefill(q, paged, plan.prefill, spec, out)
        return out

    def _prefill(
        self, q: Tensor, cache: PagedCache, rows: QueryRows, spec: AttentionSpec, out: Tensor
    ) -> None:
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = cache.k.shape[2]
        group, num_splits = num_heads // num_kv_heads, 1
        if self.is_hopper and suits_tma(q, cache, rows.max_query_len, spec):
            config = TMA_CONFIG
        else:
            num_q_rows = rows.max_query_len * group
            config = prefill_config(head_dim, q.dtype, num_q_rows, cache.is_fp8)
            max_keys = cache.max_context
            if spec.window is not None:
                max_keys = min(max_keys, spec.window + rows.max_query_len)
            num_splits = choose_prefill_splits(
                num_tokens * group, num_kv_heads, config, max_keys, self.num_processors
            )
            if self.is_hopper and num_splits == 1:
                config = with_more_stages(config)
        paged_attention(q, cache, rows, out, spec, config, num_splits)

    def _decode(
        self, q: Tensor, cache: PagedCache, plan: TritonPlan, spec: AttentionSpec, out: Tensor
    ) -> None:
        """Compute the attention of decode rows.

        The number of key splits depends on the maximum context, not on the actual one, so that
        eager steps use the same kernels as graphs.
        """
        rows, shared = plan.decode, plan.shared
        assert rows is not None
        max_context = plan.max_context or cache.max_context
        max_keys = min(max_context, spec.window or max_context)
        num_rows, num_kv_heads, head_dim = len(rows.slots), *cache.k.shape[2:]
        num_splits = choose_splits(num_rows, num_kv_heads, max_keys, self.num_processors)
        large_tile = None
        if self.is_hopper:
            large_tile = choose_large_tile(num_rows * num_kv_heads, num_splits, max_keys)
        config = decode_config(head_dim, q.dtype, large_tile, cache.is_fp8)
        prefix = None
        if shared is not None and spec.window is None and spec.sinks is None:
            num_q_rows = min(num_rows * q.shape[1] // num_kv_heads, MAX_SMALL_TILE_ROWS)
            tiles = prefill_config(head_dim, q.dtype, num_q_rows, cache.is_fp8)
            partials = attend_shared(q, cache, shared.groups, shared.members, spec, tiles)
            prefix = SharedPartials(shared.lens, partials)
        paged_attention(q, cache, rows, out, spec, config, num_splits, prefix)
