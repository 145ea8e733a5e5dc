"""Samples only tokens that a mask allows, in the rows that have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanovllm.devices.base import Device
from nanovllm.engine.step import IntColumn, StepPlan
from nanovllm.worker.forward import Sampled, StepLogits

# Does all that a MaskedSampler does at once; None, and nothing done: it cannot for such a step.
Replay = Callable[[StepLogits, StepPlan, IntColumn], Sampled | None]


@dataclass(frozen=True, slots=True)
class MaskedSampler:
    """Masks have a bit for each token, in words of 32."""

    device: Device
    sampler: Callable[[StepLogits, StepPlan], Sampled]
    replay: Replay | None = None

    def __call__(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled:
        """Sample a plan, whose logits are edited in place."""
        sampled = None if self.replay is None else self.replay(logits, plan, masks)
        if sampled is None:
            self.apply(logits.values, plan, masks)
            sampled = self.sampler(logits, plan)
        return sampled

    def apply(self, logits: Tensor, plan: StepPlan, masks: IntColumn) -> None:
        """Edit the logits [sampled rows, vocab_size]."""
        rows = None
        if len(masks) < len(logits):
            rows = self.device.upload(np.cumsum(plan.num_logits > 0)[plan.masked_rows] - 1)
        self.device.keep_allowed(logits, rows, self.device.readable(masks))
