"""ModelRunner: run one StepPlan on the device and return its sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.engine.step import IntColumn, Pending, StepPlan, StepResult
from nanovllm.worker.device_interface import CapturedSteps, Device
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
    from nanovllm.worker.draft_model import DraftModel
    from nanovllm.worker.request_extras import Extras, StepExtras

Sampler = Callable[[StepLogits, StepPlan], Sampled]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens that a step verifies."""

    num_logits: IntColumn  # [rows], before rows with draft tokens were split
    tokens: IntColumn | Tensor  # [positions]; on the device if the draft model generated them


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
        self.draft_model: DraftModel | None = None
        self.extras: Extras | None = None  # created for the first row that is not `is_plain`
        self._unsampled: Unsampled | None = None

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a step on the device; the next one may be queued before this one ends."""
        if self.draft_model is not None:
            plan = self.draft_model.run(plan)
        drafts: Drafts | None = None
        if has_drafts(plan):
            drafts = Drafts(plan.num_logits, host_drafts(plan))
            plan = drafts_as_rows(plan)
        if self.extras is None and not all(row.is_plain for row in plan.new_rows):
            from nanovllm.worker.request_extras import Extras

            self.extras = Extras(self.eager, self.steps)
        if plan.block_copies:
            self.eager.copy_blocks(plan)
        if self.eager.state_cache is not None:
            self.eager.state_cache.copy(plan.state_copies)
        if self.extras is None:
            logits, extras = self.forward(plan), None
        else:
            self.extras.update(plan)
            logits, extras = self.extras.run(plan, self.forward)
        if drafts is not None and self.draft_model is not None:
            # The sampler will overwrite the draft tokens.
            slots, positions = map(self.device.upload, sampled_rows(plan))
            drafts = Drafts(drafts.num_logits, self.eager.input_batch.tokens[slots, positions])
        step = Unsampled(plan, logits, extras, drafts)
        if not len(plan.masked_rows):
            return self._fetch(step, self.sampler(step.logits, plan))
        self._unsampled = step
        return Pending(lambda: step.sampled[0].result())

    def sample(self, masks: IntColumn) -> None:
        """Sample the last step, given a bitmask for each masked row."""
        step = self._unsampled
        assert step is not None
        self._unsampled = None
        sampled = None
        if self.steps is not None:
            sampled = self.steps.replay_masked(step.logits, step.plan, masks)
        if sampled is None:
            apply_token_bitmask(self.device, step.logits.values, step.plan, masks)
            sampled = self.sampler(step.logits, step.plan)
        step.sampled.append(self._fetch(step, sampled))

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
        draft_steps = None if self.draft_model is None else self.draft_model.runner.steps
        if any(steps.has_lost_step() for steps in (self.steps, draft_steps) if steps is not None):
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


def apply_token_bitmask(device: Device, logits: Tensor, plan: StepPlan, masks: IntColumn) -> None:
    """Apply the bitmasks of the masked rows to the logits [sampled rows, vocab_size]."""
    rows = None
    if len(masks) < len(logits):
        rows = device.upload(np.cumsum(plan.num_logits > 0)[plan.masked_rows] - 1)
    device.apply_token_bitmask(logits, rows, device.readable(masks))
