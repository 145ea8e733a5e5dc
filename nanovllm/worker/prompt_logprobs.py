"""Compute prompt logprobs and pooled vectors from hidden states.

Logprobs come from the model's own logits, before any edit or temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.logprobs import num_scored
from nanovllm.engine.step import StepPlan
from nanovllm.ops.interface import ResidualStream
from nanovllm.worker.forward import EagerForward, StepLogits
from nanovllm.worker.logits_edits import SlotExtras

POSITIONS_AT_A_TIME = 256  # chunk size: the logits of a long prompt may not fit in memory
TOKENS_AT_A_TIME = 1024  # chunk size for upcasting hidden states to float32

Scores = tuple[Tensor, Tensor, Tensor]  # ids, logprobs and ranks, as in StepResult


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a row that predict prompt tokens or are pooled."""

    extras: SlotExtras
    slot: int
    start: int
    count: int
    first_token: int  # index in the batch of the span's first token

    @property
    def is_end(self) -> bool:
        """Whether the span reaches the end of the prompt."""
        return self.start + self.count == self.extras.row.num_prompt_tokens


def run_with_states(eager: EagerForward, plan: StepPlan) -> tuple[StepLogits, ResidualStream]:
    """Run the model; return the sampled rows' logits and the residual stream of all tokens."""
    hidden = eager.model.model(replace(eager.batch(plan), sampled=None))
    last_tokens = np.cumsum(plan.counts)[plan.num_logits > 0] - 1
    values = eager.model.logits(hidden.select(eager.input_batch.device.upload(last_tokens)))
    return eager.step_logits(values, plan), hidden


def scored_spans(plan: StepPlan, by_slot: Mapping[int, SlotExtras]) -> list[Span]:
    """Return the spans that predict prompt tokens whose logprobs are requested."""
    spans = []
    for span in _spans(plan, by_slot):
        row = span.extras.row
        num = num_scored(span.start, span.count, row.num_prompt_tokens)
        if row.params.prompt_logprobs is not None and num > 0:
            spans.append(replace(span, count=num))
    return spans


def score_prompts(eager: EagerForward, hidden: ResidualStream, spans: list[Span]) -> Scores:
    """Return the scores of the prompt tokens that `spans` predict, in order."""
    device = eager.input_batch.device
    upload = device.upload

    def column(first: str) -> np.ndarray:
        ranges = [np.arange(span.count) + getattr(span, first) for span in spans]
        return np.concatenate(ranges)

    slots = upload(np.repeat([span.slot for span in spans], [span.count for span in spans]))
    tokens = eager.input_batch.tokens[slots, upload(column("start") + 1)]
    placeholder_ids = {image.placeholder_id for span in spans for image in span.extras.row.images}
    for placeholder_id in placeholder_ids:  # at most one: all images have the model's own
        tokens = tokens.where(tokens >= 0, placeholder_id)
    num_top = max(span.extras.row.params.prompt_logprobs or 0 for span in spans)
    indices = upload(column("first_token"))
    pieces = [
        device.token_logprobs(eager.model.logits(hidden.select(some)), own, num_top)
        for some, own in zip(
            indices.split(POSITIONS_AT_A_TIME), tokens.split(POSITIONS_AT_A_TIME), strict=True
        )
    ]
    ids, values, ranks = (torch.cat(part) for part in zip(*pieces, strict=True))
    return ids, values, ranks


def pooled_spans(plan: StepPlan, by_slot: Mapping[int, SlotExtras]) -> list[Span]:
    """Return the spans whose hidden states are pooled."""
    spans = []
    for span in _spans(plan, by_slot):
        if span.extras.row.pooling == "mean":
            spans.append(span)
        elif span.extras.row.pooling is not None and span.is_end:
            last = span.count - 1
            start, first_token = span.start + last, span.first_token + last
            spans.append(replace(span, start=start, count=1, first_token=first_token))
    return spans


def pool(eager: EagerForward, hidden: ResidualStream, spans: list[Span]) -> Tensor | None:
    """Return the vectors [prompts, dim] of the prompts that end in this step; None if none do.

    If `pooling` is two token ids, the vector begins with the logits of these tokens. The partial
    sums of unfinished prompts stay on the device.
    """
    totals = _add_up(eager, hidden, spans)
    for index, span in enumerate(spans):
        if span.extras.pooled is not None:
            totals[index] += span.extras.pooled
        if not span.is_end:
            span.extras.pooled = totals[index]
    ending = [index for index, span in enumerate(spans) if span.is_end]
    if not ending:
        return None
    rows = [spans[index].extras.row for index in ending]
    counts = [row.num_prompt_tokens if row.pooling == "mean" else 1 for row in rows]
    upload = eager.input_batch.device.upload
    means = totals[upload(np.array(ending))] / upload(np.array(counts, np.float32))[:, None]
    vectors: Tensor = eager.model.dense(means)
    labeled = [i for i, row in enumerate(rows) if isinstance(row.pooling, tuple)]
    if labeled:
        last_tokens = np.array([spans[ending[i]].first_token for i in labeled])
        logits = eager.model.logits(hidden.select(upload(last_tokens))).float()
        label_ids = upload(np.array([rows[i].pooling for i in labeled]))
        vectors[upload(np.array(labeled)), :2] = logits.gather(1, label_ids)
    return vectors


def _add_up(eager: EagerForward, hidden: ResidualStream, spans: list[Span]) -> Tensor:
    """Return the sum of each span's hidden states in float32, [spans, hidden_size]."""
    counts = np.array([span.count for span in spans])
    tokens = np.concatenate([np.arange(span.count) + span.first_token for span in spans])
    firsts = np.cumsum(counts) - counts
    upload = eager.input_batch.device.upload
    totals = hidden.residual.new_zeros(len(spans), hidden.residual.shape[1], dtype=torch.float32)
    for start in range(0, len(tokens), TOKENS_AT_A_TIME):
        some = tokens[start : start + TOKENS_AT_A_TIME]
        states = eager.model.states(hidden.select(upload(some))).float()
        offsets = upload(np.clip(firsts - start, 0, len(some)))
        order = torch.arange(len(some), device=states.device)
        totals += F.embedding_bag(order, states, offsets, mode="sum")
    return totals


def _spans(plan: StepPlan, by_slot: Mapping[int, SlotExtras]) -> Iterator[Span]:
    """Yield the span of each row that has an entry in `by_slot`."""
    columns = plan.slots, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts
    for slot, start, count, first in zip(*(c.tolist() for c in columns), strict=True):
        if slot in by_slot:
            yield Span(by_slot[slot], slot, start, count, first)
