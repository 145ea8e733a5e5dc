"""Features beyond plain sampling: edited logits, logprobs and pooled hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.engine.step import StepPlan
from nanovllm.worker.forward import EagerForward, Forward, StepLogits, sampled_rows
from nanovllm.worker.logits_edits import EditedRow, LogitsEdits, SlotExtras
from nanovllm.worker.prompt_logprobs import (
    Scores,
    pool,
    pooled_spans,
    run_with_states,
    score_prompts,
    scored_spans,
)

if TYPE_CHECKING:
    from nanovllm.worker.device_interface import CapturedSteps


@dataclass(frozen=True, slots=True)
class StepExtras:
    """The results of one step other than its tokens."""

    columns: dict[str, Tensor]  # keyed as in StepResult
    by_row: dict[int, SlotExtras]  # keyed by row of the logits
    # Indices of the rows that need logprobs, and a copy of their logits before any edit.
    kept: tuple[Tensor, Tensor] | None = None
    failures: dict[int, str] = field(default_factory=dict)  # processor errors, by logits row


class Extras:
    """Tracks the features that the sequence in each slot requests, and applies them."""

    def __init__(self, eager: EagerForward, steps: CapturedSteps | None) -> None:
        self.eager, self.steps = eager, steps
        self.device = eager.input_batch.device
        self._edits = LogitsEdits(eager.input_batch)
        self._is_first = eager.model.lm_head.group.rank == 0  # only rank 0 samples
        self._by_slot: dict[int, SlotExtras] = {}

    def update(self, plan: StepPlan) -> None:
        """Remove the sequences that have left, and add the new ones."""
        for slot in plan.released:
            self._by_slot.pop(slot, None)
        for row in plan.new_rows:
            if not row.is_plain:
                self._by_slot[row.slot] = self._edits.extras_of(row)

    def run(self, plan: StepPlan, forward: Forward) -> tuple[StepLogits, StepExtras]:
        """Run the model, with `forward` unless a row needs hidden states, and edit its logits."""
        if not self._by_slot:
            return forward(plan), StepExtras({}, {})
        scored, pooled = scored_spans(plan, self._by_slot), pooled_spans(plan, self._by_slot)
        if not scored and not pooled:
            logits = forward(plan)
            return logits, self._edit(logits.values, plan, {})
        columns: dict[str, Tensor] = {}
        logits, hidden = run_with_states(self.eager, plan)
        if self.steps is not None:
            self.steps.note(plan)
        if scored:
            columns |= named("prompt_", score_prompts(self.eager, hidden, scored))
        vectors = pool(self.eager, hidden, pooled) if pooled else None
        if vectors is not None:
            columns["pooled"] = vectors
        return logits, self._edit(logits.values, plan, columns)

    def finish(self, extras: StepExtras, tokens: Tensor) -> dict[str, Tensor]:
        """Return the columns of a step, including the logprobs of its sampled `tokens`."""
        if extras.kept is not None:
            rows, logits = extras.kept
            own = tokens[rows].clamp(min=0)  # NO_TOKEN is not a valid index
            num_top = max(each.row.params.logprobs or 0 for each in extras.by_row.values())
            extras.columns.update(named("", self.device.token_logprobs(logits, own, num_top)))
        return extras.columns

    def _edit(self, logits: Tensor, plan: StepPlan, columns: dict[str, Tensor]) -> StepExtras:
        """Edit the logits [sampled rows, vocab_size] of a plan in place."""
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        by_row = {
            row: self._by_slot[slot] for row, slot in enumerate(slots) if slot in self._by_slot
        }
        extras = StepExtras(columns, by_row, self._keep(logits, by_row))
        edited = [
            EditedRow(row, slots[row], positions[row], each)
            for row, each in by_row.items()
            if each.has_edits
        ]
        self._edits.apply(logits, edited)
        for row, each in by_row.items():
            if each.processors and self._is_first:
                error = each.process(logits[row])
                if error is not None:
                    extras.failures[row] = error
        return extras

    def _keep(self, logits: Tensor, by_row: dict[int, SlotExtras]) -> tuple[Tensor, Tensor] | None:
        rows = [row for row, each in by_row.items() if each.row.params.logprobs is not None]
        if not rows:
            return None
        indices = self.device.upload(np.array(rows))
        return indices, logits.index_select(0, indices)


def named(prefix: str, scores: Scores) -> dict[str, Tensor]:
    """Return the scores as columns of a StepResult."""
    names = (f"{prefix}logprob_ids", f"{prefix}logprobs", f"{prefix}logprob_ranks")
    return dict(zip(names, scores, strict=True))
