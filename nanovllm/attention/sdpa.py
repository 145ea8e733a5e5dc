"""The reference on any device: torch's SDPA, row by row, over each row's own tokens only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import AttentionSpec, BatchRows
from nanovllm.attention.rows import PrefillRow, attend_prefill, plan_row
from nanovllm.kernels.ops import LayerCache


class SdpaAttention:
    def __init__(self, block_size: int, product_dtype: torch.dtype | None = None) -> None:
        self.block_size = block_size
        self.product_dtype = product_dtype  # None: that of the cache

    def plan(self, rows: BatchRows) -> list[PrefillRow]:
        offsets = np.cumsum(rows.counts) - rows.counts
        return [plan_row(rows, i, offsets, self.block_size) for i in range(len(offsets))]

    def attend(
        self, q: Tensor, cache: LayerCache, plan: list[PrefillRow], spec: AttentionSpec
    ) -> Tensor:
        output = torch.empty_like(q)
        for row in plan:
            attend_prefill(q, cache, row, spec, output, self.product_dtype)
        return output
