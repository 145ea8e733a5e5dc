"""From a plan to logits, by running the model as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from nanovllm.attention.base import AttentionBackend
from nanovllm.engine.step import StepPlan
from nanovllm.kernels.ops import Hidden, LayerCache
from nanovllm.layers.build import ForwardBatch
from nanovllm.models.decoder import DecoderModel
from nanovllm.worker.batch import make_batch, sampled_rows
from nanovllm.worker.tables import SlotTables


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
    tables: SlotTables
    attention: AttentionBackend
    caches: list[LayerCache]

    def __call__(self, plan: StepPlan) -> StepLogits:
        return self.step_logits(self.model(self.batch(plan)), plan)

    def with_states(self, plan: StepPlan) -> tuple[StepLogits, Hidden]:
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
        self.tables.update(plan)
        return make_batch(plan, self.tables, self.attention, self.caches)

    def step_logits(self, values: Tensor, plan: StepPlan) -> StepLogits:
        slots, positions = map(self.tables.device.upload, sampled_rows(plan))
        return StepLogits(values, slots, positions)
