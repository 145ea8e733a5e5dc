"""What is read of hidden states: the logprobs of prompt tokens, and vectors pooled of prompts.

Logprobs are those of the model's own logits, before anything edits them or a temperature scales
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.step import Pooling, StepPlan, num_scored
from nanovllm.kernels.ops import Hidden
from nanovllm.worker.forward import EagerForward

if TYPE_CHECKING:
    from nanovllm.logits.extras import Asked

POSITIONS_AT_A_TIME = 256  # of a prompt: a long one's logits would not fit into memory
TOKENS_AT_A_TIME = 1024  # whose states are upcast to float32

Scores = tuple[Tensor, Tensor, Tensor]  # ids, log-probabilities and ranks, as in StepResult


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of a plan, some of whose positions predict tokens of its prompt."""

    slot: int
    start: int
    count: int
    first_token: int  # in the batch
    num_best: int


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


def scored_rows(plan: StepPlan, asked: Mapping[int, Asked]) -> list[ScoredRow]:
    rows = []
    for each, slot, start, count, first in _rows(plan, asked):
        if each.num_prompt_logprobs is None:
            continue
        if (num := num_scored(start, count, each.num_prompt_tokens)) > 0:
            rows.append(ScoredRow(slot, start, num, first, each.num_prompt_logprobs))
    return rows


def score_prompts(eager: EagerForward, hidden: Hidden, rows: list[ScoredRow]) -> Scores:
    """Score prompt tokens by the hidden states of all tokens of a step."""
    device = eager.tables.device
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


def pooled_rows(plan: StepPlan, asked: Mapping[int, Asked]) -> list[PooledRow]:
    rows = []
    for each, _, start, count, first in _rows(plan, asked):
        prompt = each.pooled
        if prompt is None:
            continue
        is_end = start + count == prompt.num_tokens
        if prompt.pooling == "mean":
            rows.append(PooledRow(prompt, first, count, is_end))
        elif is_end:
            rows.append(PooledRow(prompt, first + count - 1, 1, is_end))
    return rows


def pool(eager: EagerForward, hidden: Hidden, rows: list[PooledRow]) -> Tensor | None:
    """Return the vectors of the prompts that end, [prompts, hidden_size], if any do.

    The sums of those that go on stay on the device.
    """
    totals = _add_up(eager, hidden, rows)
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
    upload = eager.tables.device.upload
    return totals[upload(np.array(ending))] / upload(np.array(counts, np.float32))[:, None]


def _add_up(eager: EagerForward, hidden: Hidden, rows: list[PooledRow]) -> Tensor:
    """Return the sum of each row's states in float32, [rows, hidden_size]."""
    counts = np.array([row.num_tokens for row in rows])
    tokens = np.concatenate([np.arange(row.num_tokens) + row.first_token for row in rows])
    firsts = np.cumsum(counts) - counts
    upload = eager.tables.device.upload
    totals = hidden.residual.new_zeros(len(rows), hidden.residual.shape[1], dtype=torch.float32)
    for start in range(0, len(tokens), TOKENS_AT_A_TIME):
        some = tokens[start : start + TOKENS_AT_A_TIME]
        states = eager.model.states(hidden.select(upload(some))).float()
        offsets = upload(np.clip(firsts - start, 0, len(some)))
        order = torch.arange(len(some), device=states.device)
        totals += F.embedding_bag(order, states, offsets, mode="sum")
    return totals


def _rows(plan: StepPlan, asked: Mapping[int, Asked]) -> Iterator[tuple[Asked, int, int, int, int]]:
    """Yield the rows that ask for anything: their slot, start, count and first token."""
    columns = plan.slots, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts
    for slot, start, count, first in zip(*(c.tolist() for c in columns), strict=True):
        if slot in asked:
            yield asked[slot], slot, start, count, first
