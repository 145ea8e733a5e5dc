"""Attention on the CPU: our kernel reads the paged cache for decode rows; prefill uses SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionSpec, BatchRows
from nanovllm.attention.sdpa import PrefillRow, attend_prefill, plan_row
from nanovllm.devices.cpu.kernels import dense
from nanovllm.devices.cpu.program import Launcher, float_bits
from nanovllm.ops.interface import LayerCache


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    tokens: Tensor  # [decode rows], index of each row's token in the batch
    lengths: Tensor  # [decode rows], context lengths
    block_tables: Tensor  # [decode rows, groups, max_blocks]
    max_length: int
    prefills: list[PrefillRow]


class NumbaAttention:
    def __init__(
        self, block_size: int, launcher: Launcher, matmul_dtype: torch.dtype | None = None
    ) -> None:
        self.block_size = block_size
        self.launcher = launcher
        self.matmul_dtype = matmul_dtype  # dtype for SDPA; None: the dtype of q

    def plan(self, rows: BatchRows) -> NumbaPlan:
        offsets = np.cumsum(rows.counts) - rows.counts
        decodes, prefills = np.flatnonzero(rows.counts == 1), np.flatnonzero(rows.counts != 1)
        lengths = (rows.starts[decodes] + 1).astype(np.int32)
        return NumbaPlan(
            torch.from_numpy(offsets[decodes].astype(np.int64)),
            torch.from_numpy(lengths),
            torch.from_numpy(rows.block_tables.numpy()[rows.slots[decodes]]),
            int(lengths.max(initial=0)),
            [plan_row(rows, i, offsets, self.block_size) for i in prefills.tolist()],
        )

    def attend(self, q: Tensor, cache: LayerCache, plan: NumbaPlan, spec: AttentionSpec) -> Tensor:
        output = self.launcher.empty(*q.shape)
        if len(plan.tokens):
            self._decode(q, cache, plan, spec, output)
        for row in plan.prefills:
            attend_prefill(q, cache, row, spec, output, self.matmul_dtype)
        return output

    def _decode(
        self, q: Tensor, cache: LayerCache, plan: NumbaPlan, spec: AttentionSpec, output: Tensor
    ) -> None:
        _, num_heads, head_dim = q.shape
        num_kv_heads = cache.k.shape[2]
        group = num_heads // num_kv_heads
        block_table = plan.block_tables[:, cache.group]
        # Scratch per thread and query head of a group: the query, the output, a score per position.
        scratch_size = self.launcher.num_threads * group * (2 * head_dim + plan.max_length)
        scratch = self.launcher.scratch(scratch_size)
        sinks = None if spec.sinks is None else spec.sinks.float()
        self.launcher.launch(
            dense.attend,
            *(output, q, q.stride(0), cache.k, cache.v),
            *(block_table, block_table.stride(0), plan.tokens, plan.lengths),
            scratch,
            len(plan.tokens),
            plan.max_length,
            num_heads,
            num_kv_heads,
            head_dim,
            self.block_size,
            float_bits(spec.scale),
            plan.max_length if spec.window is None else spec.window,
            float_bits(spec.softcap or 0.0),
            sinks,
            *(cache.k_exponents, cache.v_exponents),
            other=cache.k.dtype,
        )
