"""Leaves of some rows' logits only the tokens that a mask allows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.platforms.base import Platform


class Masks:
    """Masks have a bit for each token, in words of 32."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        # For each byte that there is, eight booleans, which are looked up as one number.
        self._is_forbidden = platform.upload((bits == 0).view(np.int64)[:, 0])

    def apply(self, logits: Tensor, plan: StepPlan, masks: IntColumn) -> None:
        """Edit the logits [sampled rows, vocab_size] of a plan in place."""
        octets = self.platform.upload(masks.view(np.uint8)).int()
        is_forbidden = self._is_forbidden.index_select(0, octets.flatten()).view(torch.bool)
        is_forbidden = is_forbidden.view(len(masks), -1)[:, : logits.shape[1]]
        if len(masks) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        rows = self.platform.upload(np.cumsum(plan.num_logits > 0)[plan.masked_rows] - 1)
        kept = logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, rows, kept)
