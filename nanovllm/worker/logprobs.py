"""Log-probabilities of sampled tokens, and of the likeliest ones, for the rows that ask for them.

They are the model's own: of its logits before anything edits them or a temperature scales them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import StepPlan
from nanovllm.kernels.torch_sampling import token_logprobs
from nanovllm.worker.batch import sampled_rows
from nanovllm.worker.tables import SlotTables


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """What the model said of some rows, as it said it."""

    rows: Tensor  # of the step's logits
    logits: Tensor  # [rows, vocab_size]
    num_best: int

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, log-probabilities and ranks, as StepResult holds them."""
        own = tokens[self.rows].clamp(min=0)  # NO_TOKEN is none
        return token_logprobs(self.logits, own, self.num_best)


class Logprobs:
    """Plans tell it in order which sequences come and go; most ask for none."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        self._num_best: dict[int, int] = {}  # by slot

    def update(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self._num_best.pop(slot, None)
        for row in plan.new_rows:
            if row.params.logprobs is not None:
                self._num_best[row.slot] = row.params.logprobs

    def keep(self, logits: Tensor, plan: StepPlan) -> KeptLogits | None:
        """Copy the rows that ask, before their logits are edited."""
        if not self._num_best:
            return None
        slots = sampled_rows(plan)[0].tolist()
        rows = [row for row, slot in enumerate(slots) if slot in self._num_best]
        if not rows:
            return None
        num_best = max(self._num_best[slots[row]] for row in rows)
        indices = self.tables.platform.upload(np.array(rows))
        return KeptLogits(indices, torch.index_select(logits, 0, indices), num_best)
