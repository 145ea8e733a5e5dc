"""Attention on CUDA with the optional flash-attn 2 package (`attention_backend='flash_attn'`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec, BatchRows, DecodeRows
from nanovllm.errors import ConfigError
from nanovllm.ops.interface import LayerCache
from nanovllm.worker.device_interface import Device

BLOCK_SIZE = 256  # flash-attn 2 requires the block size of a paged cache to be a multiple of this


def load_flash_attention(device: Device, block_size: int, dtype: torch.dtype) -> FlashAttention:
    """Check that the flash-attn package supports this engine, and return the backend."""
    if dtype == torch.float32:
        raise ConfigError(
            "attention_backend='flash_attn' supports only float16 and bfloat16, but the model "
            "runs in float32; set dtype='bfloat16', or use attention_backend='auto'"
        )
    if block_size % BLOCK_SIZE:
        raise ConfigError(
            "attention_backend='flash_attn' needs a kvcache_block_size that is a multiple of "
            f"{BLOCK_SIZE}, got {block_size}; set kvcache_block_size={BLOCK_SIZE}"
        )
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as error:
        raise ConfigError(
            "attention_backend='flash_attn' needs flash-attn 2, built for the installed torch, "
            f"but it cannot be imported ({error}); try `pip install flash-attn "
            "--no-build-isolation`, or use attention_backend='auto'"
        ) from error
    return FlashAttention(device, block_size, flash_attn_varlen_func, flash_attn_with_kvcache)


@dataclass(frozen=True, slots=True)
class FlashDecode:
    """Plan for decode rows only; row i is token i."""

    block_tables: Tensor  # [rows, groups, max_blocks]
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class FlashMixed:
    """Plan for rows with any number of tokens."""

    block_tables: Tensor  # [rows, groups, max_blocks]
    cu_seqlens_q: Tensor  # [rows + 1]
    cu_seqlens_k: Tensor
    max_query_len: int
    max_context: int


class FlashAttention:
    """Attention by flash-attn: `attend_cached` for decode steps, `attend_varlen` for all others."""

    def __init__(
        self,
        device: Device,
        block_size: int,
        attend_varlen: Callable[..., Tensor],
        attend_cached: Callable[..., Tensor],
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.attend_varlen = attend_varlen
        self.attend_cached = attend_cached

    def plan(self, rows: BatchRows) -> FlashDecode | FlashMixed:
        """Plan a batch; its slots and lengths are copied to the device in one transfer."""
        ends = rows.starts + rows.counts
        max_context = int(ends.max(initial=1))
        if (rows.counts == 1).all():
            slots, context_lens = self.device.upload(np.stack((rows.slots, ends)))
            tables = self._row_tables(rows.block_tables, slots, max_context)
            return FlashDecode(tables, context_lens)
        columns = np.zeros((3, len(ends) + 1), np.int32)
        columns[0, 1:] = rows.slots
        columns[1, 1:] = np.cumsum(rows.counts)
        columns[2, 1:] = np.cumsum(ends)
        slots, cu_seqlens_q, cu_seqlens_k = self.device.upload(columns)
        tables = self._row_tables(rows.block_tables, slots[1:], max_context)
        max_query_len = int(rows.counts.max())
        return FlashMixed(tables, cu_seqlens_q, cu_seqlens_k, max_query_len, max_context)

    def decode_plan(self, rows: DecodeRows) -> FlashDecode:
        max_context = rows.max_context or rows.block_tables.shape[2] * self.block_size
        tables = self._row_tables(rows.block_tables, rows.slots, max_context)
        return FlashDecode(tables, rows.context_lens)

    def attend(
        self, q: Tensor, cache: LayerCache, plan: FlashDecode | FlashMixed, spec: AttentionSpec
    ) -> Tensor:
        if len(q) == 0:  # flash-attn rejects empty inputs
            return torch.empty_like(q)
        if spec.sinks is not None:
            raise ConfigError(
                "attention_backend='flash_attn' does not support the attention sinks of this "
                "model; use attention_backend='auto'"
            )
        # Number of keys before the query that it attends to; -1: all.
        before = -1 if spec.window is None else spec.window - 1
        options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": True}
        options["window_size"] = before, 0
        if spec.softcap is not None:
            options["softcap"] = spec.softcap
        options["block_table"] = plan.block_tables[:, cache.group]
        if isinstance(plan, FlashDecode):
            output = self.attend_cached(
                q[:, None],  # [rows, 1, heads, dim]
                cache.k,
                cache.v,
                cache_seqlens=plan.context_lens,
                **options,
            )
            return output[:, 0]
        return self.attend_varlen(
            q,
            cache.k,
            cache.v,
            cu_seqlens_q=plan.cu_seqlens_q,
            cu_seqlens_k=plan.cu_seqlens_k,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_context,
            **options,
        )

    def _row_tables(self, block_tables: Tensor, slots: Tensor, max_context: int) -> Tensor:
        """Gather the rows' block tables, truncated to `max_context`.

        flash-attn chooses the number of key splits from the width of the table.
        """
        width = -(-max_context // self.block_size)
        return block_tables[:, :, :width].index_select(0, slots)
