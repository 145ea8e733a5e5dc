"""Sample a step with bitmasks, which allow the tokens that a grammar accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.engine.step import Bitmasks, StepPlan
from nanovllm.worker.device_interface import Device

if TYPE_CHECKING:
    from nanovllm.worker.forward import Sampled
    from nanovllm.worker.model_runner import ModelRunner, Unsampled


def sample_masked(runner: ModelRunner, step: Unsampled, bitmasks: Bitmasks) -> Sampled:
    """Sample a step whose logits are computed, if possible by replaying a captured step."""
    if runner.steps is not None:
        sampled = runner.steps.replay_masked(step.logits, step.plan, bitmasks.words)
        if sampled is not None:
            return sampled
    apply_bitmasks(runner.device, step.logits.values, step.plan, bitmasks)
    return runner.sampler(step.logits, step.plan)


def apply_bitmasks(device: Device, logits: Tensor, plan: StepPlan, bitmasks: Bitmasks) -> None:
    """Apply the bitmasks of a plan to its logits [sampled rows, vocab_size]."""
    rows, words = None, bitmasks.words
    if not len(words):
        return
    if len(words) < len(logits):
        slots = plan.slots[plan.num_logits > 0]
        rows = device.upload(np.flatnonzero(np.isin(slots, bitmasks.slots)))
    device.apply_token_bitmask(logits, rows, device.readable(words))
