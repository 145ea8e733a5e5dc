"""Hidden states of a prompt, pooled into one vector, for the requests that ask for that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.step import NewRow, Pooling, StepPlan
from nanovllm.kernels.ops import Hidden
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.tables import BySlot

TOKENS_AT_A_TIME = 1024  # whose states are widened to float32


@dataclass(slots=True, eq=False)
class PooledPrompt:
    pooling: Pooling
    num_tokens: int
    total: Tensor | None = None  # [hidden_size], of the chunks so far


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A row of a plan, and which of its states are added up."""

    prompt: PooledPrompt
    first_token: int  # in the batch
    num_tokens: int
    is_end: bool  # of the prompt


class PooledPrompts:
    """What prompts that come in chunks have so far stays on the device."""

    def __init__(self, eager: EagerForward) -> None:
        self.model = eager.model
        self.device = eager.tables.device
        self._prompts: BySlot[PooledPrompt] = BySlot()

    def update(self, plan: StepPlan) -> None:
        self._prompts.follow(plan, _pooled_prompt)

    def wanted(self, plan: StepPlan) -> list[PooledRow]:
        if not self._prompts:
            return []
        ends, last_tokens = plan.starts + plan.counts, np.cumsum(plan.counts) - 1
        columns = (plan.slots, plan.counts, ends, last_tokens)
        rows = []
        for slot, count, end, last in zip(*(c.tolist() for c in columns), strict=True):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            is_end = end == prompt.num_tokens
            if prompt.pooling == "mean":
                rows.append(PooledRow(prompt, last + 1 - count, count, is_end))
            elif is_end:
                rows.append(PooledRow(prompt, last, 1, is_end))
        return rows

    def of(self, hidden: Hidden, rows: list[PooledRow]) -> Tensor | None:
        """Return the vectors of the prompts that end, [prompts, hidden_size], if any do."""
        totals = self._add_up(hidden, rows)
        for index, row in enumerate(rows):
            if row.prompt.total is not None:
                totals[index] += row.prompt.total
            if not row.is_end:
                row.prompt.total = totals[index]
        ending = [index for index, row in enumerate(rows) if row.is_end]
        if not ending:
            return None
        prompts = [rows[index].prompt for index in ending]
        counts = [each.num_tokens if each.pooling == "mean" else 1 for each in prompts]
        upload = self.device.upload
        return totals[upload(np.array(ending))] / upload(np.array(counts, np.float32))[:, None]

    def _add_up(self, hidden: Hidden, rows: list[PooledRow]) -> Tensor:
        """Return the sum of each row's states in float32, [rows, hidden_size]."""
        counts = np.array([row.num_tokens for row in rows])
        tokens = np.concatenate([np.arange(row.num_tokens) + row.first_token for row in rows])
        firsts = np.cumsum(counts) - counts
        upload = self.device.upload
        totals = hidden.residual.new_zeros(len(rows), hidden.residual.shape[1], dtype=torch.float32)
        for start in range(0, len(tokens), TOKENS_AT_A_TIME):
            some = tokens[start : start + TOKENS_AT_A_TIME]
            states = self.model.states(hidden.select(upload(some))).float()
            offsets = upload(np.clip(firsts - start, 0, len(some)))
            order = torch.arange(len(some), device=states.device)
            totals += F.embedding_bag(order, states, offsets, mode="sum")
        return totals


def _pooled_prompt(row: NewRow) -> PooledPrompt | None:
    return None if row.pooling is None else PooledPrompt(row.pooling, row.num_prompt_tokens)
