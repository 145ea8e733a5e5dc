"""From a plan to the tensors that a model reads, and to logits, by running it as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, BatchRows
from nanovllm.engine.step import StepPlan
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.models.decoder import DecoderModel
from nanovllm.ops.interface import LayerCache, ResidualStream
from nanovllm.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepLogits:
    """One row for each sampled row of the plan, in its order."""

    values: Tensor  # [rows, vocab_size]
    slots: Tensor
    positions: Tensor  # of the token that will be sampled
    graph: tuple[int, int] | None = None  # that wrote them: its rows, its longest context


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each sampled row of a plan."""

    tokens: Tensor  # [rows], on the device
    host: Tensor | None = None  # the same in the host's memory, where the device writes there too


Forward = Callable[[StepPlan], StepLogits]  # also writes to the tables what a plan changes


@dataclass(frozen=True, slots=True)
class EagerForward:
    model: DecoderModel
    tables: InputBatch
    attention: AttentionBackend
    caches: list[LayerCache]

    def __call__(self, plan: StepPlan) -> StepLogits:
        return self.step_logits(self.model(self.batch(plan)), plan)

    def with_states(self, plan: StepPlan) -> tuple[StepLogits, ResidualStream]:
        """Return also the hidden states of every token, before the final norm."""
        hidden = self.model.model(replace(self.batch(plan), sampled=None))
        last_tokens = np.cumsum(plan.counts)[plan.num_logits > 0] - 1
        values = self.model.logits(hidden.select(self.tables.device.upload(last_tokens)))
        return self.step_logits(values, plan), hidden

    def copy_blocks(self, plan: StepPlan) -> None:
        upload = self.tables.device.upload
        sources = upload(np.array([copy.source for copy in plan.block_copies]))
        targets = upload(np.array([copy.target for copy in plan.block_copies]))
        for cache in self.caches:
            for part in cache.parts:
                part.index_copy_(0, targets, part.index_select(0, sources))

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """Lay all rows' tokens out one after another."""
        self.tables.update(plan)
        tables, upload = self.tables, self.tables.device.upload
        slots, positions = (upload(column) for column in tokens_of(plan))
        input_ids, slot_mapping = look_up(tables, slots, positions)
        rows = BatchRows(plan.slots, plan.starts, plan.counts, tables.block_table)
        sampled = None
        if not is_decode(plan):
            is_sampled = plan.num_logits > 0
            last_tokens = np.cumsum(plan.counts)[is_sampled] - 1
            last_rows = self.attention.plan(rows.last_tokens(is_sampled))
            sampled = SampledTokens(upload(last_tokens), last_rows)
        planned = self.attention.plan(rows)
        return ForwardBatch(input_ids, positions, slot_mapping, sampled, planned, self.caches)

    def step_logits(self, values: Tensor, plan: StepPlan) -> StepLogits:
        slots, positions = map(self.tables.device.upload, sampled_rows(plan))
        return StepLogits(values, slots, positions)


def look_up(tables: InputBatch, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens at some positions, and where in the cache their keys go."""
    block_ids = tables.block_table[slots, positions // tables.block_size].long()
    slot_mapping = block_ids * tables.block_size + positions % tables.block_size
    return tables.tokens[slots, positions], slot_mapping


def tokens_of(plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Slot and position of every token that a step runs."""
    row_ids = np.repeat(np.arange(len(plan.slots)), plan.counts)
    firsts = plan.starts - (np.cumsum(plan.counts) - plan.counts)
    return plan.slots[row_ids].astype(np.int64), np.arange(len(row_ids)) + firsts[row_ids]


def sampled_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the sampled rows, and the position of the token each one samples."""
    is_sampled = plan.num_logits > 0
    return plan.slots[is_sampled], (plan.starts + plan.counts)[is_sampled]


def is_decode(plan: StepPlan) -> bool:
    """Whether every row runs one token and samples the next."""
    return bool((plan.counts == 1).all() and plan.num_logits.all())
