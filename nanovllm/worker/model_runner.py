"""ModelRunner: run one StepPlan on the device and return its sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.engine.step import Bitmasks, IntColumn, Pending, StepPlan, StepResult
from nanovllm.sampling_params import NO_TOKEN
from nanovllm.worker.bitmasks import sample_masked
from nanovllm.worker.device_interface import CapturedSteps
from nanovllm.worker.draft_rows import count_valid, drafts_as_rows, host_drafts
from nanovllm.worker.forward import (
    EagerForward,
    Forward,
    Sampled,
    StepLogits,
    has_drafts,
    sampled_rows,
)

if TYPE_CHECKING:
    from nanovllm.worker.request_extras import Extras, StepExtras

Stage = Callable[[StepPlan], StepPlan]  # runs before the model, and may change the plan
Sampler = Callable[[StepLogits, StepPlan], Sampled]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens that a step verifies."""

    num_logits: IntColumn  # [rows], before rows with draft tokens were split
    tokens: IntColumn | Tensor  # [positions]; on the device if a model generated them


@dataclass(frozen=True, slots=True)
class Unsampled:
    """A step whose logits are computed but not sampled yet."""

    plan: StepPlan
    logits: StepLogits
    extras: StepExtras | None
    drafts: Drafts | None = None
    sampled: list[Pending[StepResult]] = field(default_factory=list)  # has one item after sampling


@dataclass(eq=False)
class ModelRunner:
    """Runs the model, edits the logits if requested, then samples."""

    eager: EagerForward
    forward: Forward  # `eager`, or a function that replays captured steps
    sampler: Sampler
    steps: CapturedSteps | None = None  # the captured steps behind `forward` and `sampler`

    def __post_init__(self) -> None:
        self.device = self.eager.input_batch.device
        self.stages: list[Stage] = []
        # Captured steps that may be lost: its own, and those of models that its stages run.
        self.all_steps = [] if self.steps is None else [self.steps]
        self.extras: Extras | None = None  # created for the first row that is not `is_plain`
        self._unsampled: Unsampled | None = None

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a step on the device; the next one may be queued before this one ends."""
        for stage in self.stages:
            plan = stage(plan)
        drafts: Drafts | None = None
        is_generated = False  # whether the draft tokens are known only on the device
        if has_drafts(plan):
            drafts = Drafts(plan.num_logits, host_drafts(plan))
            is_generated = any(NO_TOKEN in update.token_ids for update in plan.draft_updates)
            plan = drafts_as_rows(plan)
        if self.extras is None and not all(row.is_plain for row in plan.new_rows):
            from nanovllm.worker.request_extras import Extras

            self.extras = Extras(self.eager, self.steps)
        if self.eager.state_cache is not None:
            self.eager.state_cache.copy(plan.state_copies)
        if self.extras is None:
            logits, extras = self.forward(plan), None
        else:
            self.extras.update(plan)
            logits, extras = self.extras.run(plan, self.forward)
        if drafts is not None and is_generated:
            # The sampler will overwrite the draft tokens.
            slots, positions = map(self.device.upload, sampled_rows(plan))
            drafts = Drafts(drafts.num_logits, self.eager.input_batch.tokens[slots, positions])
        step = Unsampled(plan, logits, extras, drafts)
        if not plan.needs_bitmasks:
            return self._fetch(step, self.sampler(step.logits, plan))
        self._unsampled = step
        return Pending(lambda: step.sampled[0].result())

    def sample(self, bitmasks: Bitmasks) -> None:
        """Sample the last step, given its bitmasks."""
        step, self._unsampled = self._unsampled, None
        assert step is not None
        step.sampled.append(self._fetch(step, sample_masked(self, step, bitmasks)))

    def _fetch(self, step: Unsampled, sampled: Sampled) -> Pending[StepResult]:
        columns: dict[str, Tensor] = {}
        if self.extras is not None and step.extras is not None:
            columns = self.extras.finish(step.extras, sampled.tokens)
        tensors = list(columns.values())
        if step.drafts is not None and isinstance(step.drafts.tokens, Tensor):
            tensors.append(step.drafts.tokens)
        tokens = sampled.tokens if sampled.host is None else sampled.host
        fetched, names = self.device.fetch(tokens, *tensors), list(columns)
        return Pending(lambda: self._result(fetched, names, step))

    def _result(
        self, fetched: Pending[list[np.ndarray]], names: list[str], step: Unsampled
    ) -> StepResult:
        tokens, *others = fetched.result()
        if any(steps.has_lost_step() for steps in self.all_steps):
            return StepResult(tokens, is_lost=True)
        num_valid = None
        if (drafts := step.drafts) is not None:
            draft_tokens = others.pop() if isinstance(drafts.tokens, Tensor) else drafts.tokens
            num_valid = count_valid(drafts.num_logits, tokens, draft_tokens)
        columns = dict(zip(names, others, strict=True))
        if step.extras is None:
            return StepResult(tokens, num_valid, columns)
        for row, slot_extras in step.extras.by_row.items():
            if slot_extras.processors:
                slot_extras.output_ids.append(int(tokens[row]))
        return StepResult(tokens, num_valid, columns, step.extras.failures)
