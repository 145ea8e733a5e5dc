"""What requests ask for beside sampling: edited logits, logprobs, pooled hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.logits.edits import EditedRow, LogitsEdits, ProcessedSequence, RowEdits
from nanovllm.logits.reads import (
    PooledPrompt,
    Scores,
    pool,
    pooled_rows,
    score_prompts,
    scored_rows,
)
from nanovllm.worker.forward import EagerForward, Forward, StepLogits, sampled_rows

if TYPE_CHECKING:
    from nanovllm.worker.runner import RecordedSteps


@dataclass(frozen=True, slots=True)
class Asked:
    """What one sequence asks for."""

    num_prompt_tokens: int
    num_logprobs: int | None  # of the sampled token, with that many of the most probable
    num_prompt_logprobs: int | None
    pooled: PooledPrompt | None
    edits: RowEdits | None
    processed: ProcessedSequence | None


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """The model's logits of the rows that ask for logprobs, before anything edits them."""

    rows: Tensor  # of the step's logits
    logits: Tensor  # [rows, vocab_size]
    num_best: int


@dataclass(frozen=True, slots=True)
class StepExtras:
    """What one step has to return beside its tokens."""

    results: dict[str, Tensor]  # by field of StepResult
    processed: dict[int, ProcessedSequence] = field(default_factory=dict)  # by row of the logits
    failures: dict[int, str] = field(default_factory=dict)  # of processors, by row
    kept: KeptLogits | None = None


class Extras:
    """Knows what the sequence in each slot asks for, by the plans that it has seen."""

    def __init__(self, eager: EagerForward, steps: RecordedSteps | None) -> None:
        self.eager, self.steps = eager, steps
        self.device = eager.tables.device
        self._edits = LogitsEdits(eager.tables)
        self._is_first = eager.model.lm_head.group.rank == 0  # which alone samples
        self._asked: dict[int, Asked] = {}  # by slot

    def update(self, plan: StepPlan) -> None:
        """Forget the sequences that left, and learn what the new ones ask for."""
        for slot in plan.released:
            self._asked.pop(slot, None)
        for row in plan.new_rows:
            if not row.is_plain:
                self._asked[row.slot] = self._asked_by(row)

    def run(self, plan: StepPlan, forward: Forward) -> tuple[StepLogits, StepExtras]:
        """Run the model and edit its logits; `forward` if nobody needs the hidden states."""
        results: dict[str, Tensor] = {}
        if not self._asked:
            return forward(plan), StepExtras(results)
        scored, pooled = scored_rows(plan, self._asked), pooled_rows(plan, self._asked)
        if not scored and not pooled:
            logits = forward(plan)
        else:
            logits, hidden = self.eager.with_states(plan)
            if self.steps is not None:
                self.steps.note(plan)
            if scored:
                results |= named("prompt_", score_prompts(self.eager, hidden, scored))
            vectors = pool(self.eager, hidden, pooled) if pooled else None
            if vectors is not None:
                results["pooled"] = vectors
        return logits, self._edit(plan, logits.values, results)

    def finish(self, extras: StepExtras, tokens: Tensor) -> dict[str, Tensor]:
        """Return the results of a step, given what it sampled."""
        kept = extras.kept
        if kept is not None:
            own = tokens[kept.rows].clamp(min=0)  # NO_TOKEN is none
            scores = self.device.token_logprobs(kept.logits, own, kept.num_best)
            extras.results.update(named("", scores))
        return extras.results

    def _asked_by(self, row: NewRow) -> Asked:
        params = row.params
        return Asked(
            row.num_prompt_tokens,
            params.logprobs,
            params.prompt_logprobs,
            None if row.pooling is None else PooledPrompt(row.pooling, row.num_prompt_tokens),
            self._edits.edits_of(row),
            ProcessedSequence.of(row) if self._is_first else None,
        )

    def _edit(self, plan: StepPlan, logits: Tensor, results: dict[str, Tensor]) -> StepExtras:
        """Change the logits [sampled rows, vocab_size] of a plan in place."""
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        asked = {row: self._asked[slot] for row, slot in enumerate(slots) if slot in self._asked}
        extras = StepExtras(
            results,
            {row: each.processed for row, each in asked.items() if each.processed is not None},
            kept=self._keep(logits, asked),
        )
        edited = [
            EditedRow(row, slots[row], positions[row], each.edits)
            for row, each in asked.items()
            if each.edits is not None
        ]
        self._edits.apply(logits, edited)
        for row, sequence in extras.processed.items():
            error = sequence.process(logits[row])
            if error is not None:
                extras.failures[row] = error
        return extras

    def _keep(self, logits: Tensor, asked: dict[int, Asked]) -> KeptLogits | None:
        counts = {row: each.num_logprobs for row, each in asked.items()}
        wanted = {row: count for row, count in counts.items() if count is not None}
        if not wanted:
            return None
        rows = self.device.upload(np.array([*wanted]))
        return KeptLogits(rows, logits.index_select(0, rows), max(wanted.values()))


def named(prefix: str, scores: Scores) -> dict[str, Tensor]:
    """Name scores as the fields of StepResult."""
    names = (f"{prefix}logprob_ids", f"{prefix}logprobs", f"{prefix}logprob_ranks")
    return dict(zip(names, scores, strict=True))
