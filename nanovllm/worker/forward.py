"""Turn a plan into the model's input tensors, and run the model eagerly to get logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, BatchRows
from nanovllm.engine.step import StepPlan
from nanovllm.layers.build import ForwardBatch, SampledTokens
from nanovllm.ops.interface import LayerCache, LayerState
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.state_cache import StateCache, recurrent_rows

if TYPE_CHECKING:
    from nanovllm.models.registry import Model


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the sampled rows of a plan, in the plan's order."""

    values: Tensor  # [rows, vocab_size]
    slots: Tensor
    positions: Tensor  # positions of the tokens to sample
    # Bucket of the CUDA graph that wrote the logits, if any: (batch size, maximum context length).
    graph: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens sampled for the rows of a plan."""

    tokens: Tensor  # [rows], on the device
    host: Tensor | None = None  # the same tokens in host memory, if the device writes them there


Forward = Callable[[StepPlan], StepLogits]  # also applies the plan's changes to the InputBatch
Edit = Callable[[StepPlan, ForwardBatch], ForwardBatch]


@dataclass(frozen=True, slots=True)
class EagerForward:
    """Runs the model without graphs."""

    model: Model
    input_batch: InputBatch
    attention: AttentionBackend
    caches: list[LayerCache | LayerState]
    state_cache: StateCache | None = None  # set if the model has recurrent layers
    edits: list[Edit] = field(default_factory=list)  # change each batch before it runs

    def __call__(self, plan: StepPlan) -> StepLogits:
        return self.step_logits(self.model(self.batch(plan)), plan)

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """Apply a plan to the InputBatch; return the plan's tokens, row after row, as one batch."""
        input_batch, upload = self.input_batch, self.input_batch.device.upload
        input_batch.update(plan)
        slots, positions = map(upload, slots_and_positions(plan))
        input_ids, slot_mapping = look_up(input_batch, slots, positions)
        rows = BatchRows(plan.slots, plan.starts, plan.counts, input_batch.block_tables)
        sampled = None
        if not is_decode(plan):
            last_tokens = np.cumsum(plan.counts)[plan.num_logits > 0] - 1
            slots_of, ends = sampled_rows(plan)
            last = BatchRows(slots_of, ends - 1, np.ones_like(ends), input_batch.block_tables)
            sampled = SampledTokens(upload(last_tokens), self.attention.plan(last))
        planned = self.attention.plan(rows)
        recurrent = None if self.state_cache is None else recurrent_rows(plan, upload)
        inputs = input_ids, positions, slot_mapping
        batch = ForwardBatch(*inputs, sampled, planned, self.caches, recurrent)
        for edit in self.edits:
            batch = edit(plan, batch)
        return batch

    def step_logits(self, values: Tensor, plan: StepPlan) -> StepLogits:
        slots, positions = map(self.input_batch.device.upload, sampled_rows(plan))
        return StepLogits(values, slots, positions)


def look_up(input_batch: InputBatch, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens at the given positions of slots, and their slot_mapping."""
    size = input_batch.block_size
    block_ids = input_batch.block_tables[slots, :, positions // size].long()  # [tokens, groups]
    slot_mapping = block_ids.T * size + positions % size
    return input_batch.tokens[slots, positions], slot_mapping.contiguous()


def slots_and_positions(plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the slot and the position of every token that a step runs."""
    row_ids = np.repeat(np.arange(len(plan.slots)), plan.counts)
    # A token's position is its index in the batch plus its row's offset.
    offsets = plan.starts - (np.cumsum(plan.counts) - plan.counts)
    return plan.slots[row_ids].astype(np.int64), np.arange(len(row_ids)) + offsets[row_ids]


def sampled_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of the sampled rows, and the position of the token each one samples."""
    is_sampled = plan.num_logits > 0
    return plan.slots[is_sampled], (plan.starts + plan.counts)[is_sampled]


def has_drafts(plan: StepPlan) -> bool:
    """Return whether the plan verifies draft tokens."""
    return any(update.token_ids for update in plan.draft_updates)


def is_decode(plan: StepPlan) -> bool:
    """Return whether every row runs one token and samples the next."""
    return bool((plan.counts == 1).all() and plan.num_logits.all())
