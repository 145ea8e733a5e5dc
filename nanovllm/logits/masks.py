"""Leaves of some rows' logits only the tokens that a mask allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.platforms.base import Platform

# torch_sampling.keep_allowed, or its like
TokenMasker = Callable[[Tensor, Tensor | None, Tensor], None]


class Masks:
    """Masks have a bit for each token, in words of 32."""

    def __init__(self, platform: Platform, keep_allowed: TokenMasker) -> None:
        self.platform, self.keep_allowed = platform, keep_allowed

    def apply(self, logits: Tensor, plan: StepPlan, masks: IntColumn) -> None:
        """Edit the logits [sampled rows, vocab_size] of a plan in place."""
        rows = None
        if len(masks) < len(logits):
            rows = self.platform.upload(np.cumsum(plan.num_logits > 0)[plan.masked_rows] - 1)
        self.keep_allowed(logits, rows, self.platform.readable(masks))
