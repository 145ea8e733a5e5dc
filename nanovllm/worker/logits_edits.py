"""What changes logits between the model and the sampler: so far, stop tokens that come too early.

Whatever else a request may ask to forbid or favour belongs here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import StepPlan
from nanovllm.platforms.base import Platform
from nanovllm.worker.batch import sampled_rows


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Tokens that a sequence must not sample while it is shorter than min_len."""

    min_len: int
    token_ids: list[int]


class LogitsEdits:
    """Plans tell it in order which sequences come and go; most steps change no logits at all."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._early_stops: dict[int, EarlyStop] = {}  # by slot

    def update(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._early_stops.pop(slot, None)
        for row in plan.new_rows:
            if row.params.min_tokens and row.stop_token_ids:
                min_len = row.num_prompt_tokens + row.params.min_tokens
                self._early_stops[row.slot] = EarlyStop(min_len, sorted(row.stop_token_ids))

    def apply(self, logits: Tensor, plan: StepPlan) -> None:
        """Edit the logits [sampled rows, vocab_size] of a plan in place."""
        if not self._early_stops:
            return
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        forbidden: list[int] = []  # offsets into the logits
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            stop = self._early_stops.get(slot)
            if stop is None:
                continue
            if position < stop.min_len:
                forbidden += [row * logits.shape[1] + token_id for token_id in stop.token_ids]
            else:
                del self._early_stops[slot]
        if forbidden:
            # Setting items by index would wait for the device.
            offsets = self.platform.upload(np.array(forbidden))
            logits.view(-1).index_fill_(0, offsets, -torch.inf)
