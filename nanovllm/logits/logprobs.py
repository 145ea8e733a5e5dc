"""Log-probabilities of tokens, and of the likeliest ones beside them, for the rows that ask.

They are the model's own: of its logits before anything edits them or a temperature scales them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.devices.base import Device
from nanovllm.engine.step import NewRow, StepPlan, num_scored
from nanovllm.kernels.ops import Hidden
from nanovllm.worker.batch import sampled_rows
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.tables import BySlot, SlotTables

POSITIONS_AT_A_TIME = 256  # of a prompt: a long one's logits would not fit into memory

Scores = tuple[Tensor, Tensor, Tensor]  # ids, log-probabilities and ranks, as in StepResult


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """What the model said of some rows, as it said it."""

    rows: Tensor  # of the step's logits
    logits: Tensor  # [rows, vocab_size]
    num_best: int
    device: Device

    def of(self, tokens: Tensor) -> Scores:
        own = tokens[self.rows].clamp(min=0)  # NO_TOKEN is none
        return self.device.token_logprobs(self.logits, own, self.num_best)


class Logprobs:
    """Keeps what the log-probabilities of sampled tokens need."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        self._num_best: BySlot[int] = BySlot()

    def update(self, plan: StepPlan) -> None:
        self._num_best.follow(plan, lambda row: row.params.logprobs)

    def keep(self, logits: Tensor, plan: StepPlan) -> KeptLogits | None:
        """Copy the rows that ask, before their logits are edited."""
        if not self._num_best:
            return None
        slots = sampled_rows(plan)[0].tolist()
        rows = [row for row, slot in enumerate(slots) if slot in self._num_best]
        if not rows:
            return None
        num_best = max(self._num_best[slots[row]] for row in rows)
        indices = self.tables.device.upload(np.array(rows))
        own = torch.index_select(logits, 0, indices)
        return KeptLogits(indices, own, num_best, self.tables.device)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of a plan, some of whose positions foretell tokens of its prompt."""

    slot: int
    start: int
    count: int
    first_token: int  # in the batch
    num_best: int


class PromptLogprobs:
    """Scores the tokens of the prompts whose log-probabilities somebody asks for."""

    def __init__(self, eager: EagerForward) -> None:
        self.eager = eager
        self._asking: BySlot[tuple[int, int]] = BySlot()  # how many, length of the prompt

    def update(self, plan: StepPlan) -> None:
        self._asking.follow(plan, _asked_of_prompt)

    def wanted(self, plan: StepPlan) -> list[ScoredRow]:
        if not self._asking:
            return []
        first_tokens = np.cumsum(plan.counts) - plan.counts
        columns = (plan.slots, plan.starts, plan.counts, first_tokens)
        rows = []
        for slot, start, count, first in zip(*(c.tolist() for c in columns), strict=True):
            num_best, prompt_len = self._asking.get(slot, (0, 0))
            if (num := num_scored(start, count, prompt_len)) > 0:
                rows.append(ScoredRow(slot, start, num, first, num_best))
        return rows

    def of(self, hidden: Hidden, rows: list[ScoredRow]) -> Scores:
        """Score rows of a step by the hidden states of all its tokens."""
        eager, device = self.eager, self.eager.tables.device
        upload = device.upload

        def column(first: str) -> np.ndarray:
            ranges = [np.arange(row.count) + getattr(row, first) for row in rows]
            return np.concatenate(ranges)

        slots = upload(np.repeat([row.slot for row in rows], [row.count for row in rows]))
        tokens = eager.tables.tokens[slots, upload(column("start") + 1)]
        num_best = max(row.num_best for row in rows)
        indices = upload(column("first_token"))
        pieces = [
            device.token_logprobs(eager.model.logits(hidden.select(some)), own, num_best)
            for some, own in zip(
                indices.split(POSITIONS_AT_A_TIME), tokens.split(POSITIONS_AT_A_TIME), strict=True
            )
        ]
        ids, values, ranks = (torch.cat(part) for part in zip(*pieces, strict=True))
        return ids, values, ranks


def _asked_of_prompt(row: NewRow) -> tuple[int, int] | None:
    num_best = row.params.prompt_logprobs
    return None if num_best is None else (num_best, row.num_prompt_tokens)
