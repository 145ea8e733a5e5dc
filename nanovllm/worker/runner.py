"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nanovllm.engine.step import IntColumn, StepPlan, StepResult
from nanovllm.logits.edits import LogitsEdits
from nanovllm.logits.logprobs import KeptLogits, Logprobs, PromptLogprobs
from nanovllm.logits.masks import MaskedSampler
from nanovllm.logits.pooling import PooledPrompts
from nanovllm.logits.processors import LogitsProcessors, ProcessedRows
from nanovllm.pending import Pending
from nanovllm.worker.forward import EagerForward, Forward, Sampled, StepLogits

Sampler = Callable[[StepLogits, StepPlan], Sampled]


class RecordedSteps(Protocol):
    """A device that replays steps, beside its Forward and its Sampler."""

    def note(self, plan: StepPlan) -> None:
        """Learn of a plan that runs elsewhere."""

    def replay_masked(self, logits: StepLogits, plan: StepPlan, masks: IntColumn) -> Sampled | None:
        """Sample what masks allow; None, and nothing done, if no recorded step does so."""

    def has_lost_step(self) -> bool:
        """Whether the device could not finish a step, nor those that followed it."""

    def capture_one(self) -> bool:
        """See Executor."""


@dataclass(frozen=True, slots=True)
class Unsampled:
    """A step between the model and the sampler."""

    plan: StepPlan
    logits: StepLogits
    kept: KeptLogits | None
    processed: ProcessedRows | None
    results: dict[str, Tensor]
    sampled: list[Pending[StepResult]] = field(default_factory=list)  # one, once it is


@dataclass(eq=False)
class ModelRunner:
    """Runs the model, then samples; logits may be edited in between."""

    eager: EagerForward
    forward: Forward  # the same, or what replays steps
    sampler: Sampler
    steps: RecordedSteps | None = None  # what both belong to, where steps are replayed

    def __post_init__(self) -> None:
        self.tables = self.eager.tables
        self.edits = LogitsEdits(self.tables)
        self.processors = LogitsProcessors(self.eager.model.lm_head.group)
        replay = None if self.steps is None else self.steps.replay_masked
        self.sample_masked = MaskedSampler(self.tables.device, self.sampler, replay)
        self._unsampled: Unsampled | None = None
        self.logprobs = Logprobs(self.tables)
        self.prompt_logprobs = PromptLogprobs(self.eager)
        self.pooled_prompts = PooledPrompts(self.eager)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a step; the tables already hold what the next one will read."""
        self.prompt_logprobs.update(plan)
        self.pooled_prompts.update(plan)
        if plan.block_copies:
            self.eager.copy_blocks(plan)
        results: dict[str, Tensor] = {}
        logits = self._run_model(plan, results)
        self.edits.update(plan)  # not before: the device has its work by now
        self.processors.update(plan)
        self.logprobs.update(plan)
        kept = self.logprobs.keep(logits.values, plan)
        self.edits.apply(logits.values, plan)
        processed = self.processors.apply(logits.values, plan)
        step = Unsampled(plan, logits, kept, processed, results)
        if not len(plan.masked_rows):
            return self._fetch(step, self.sampler(logits, plan))
        self._unsampled = step
        return Pending(lambda: step.sampled[0].result())

    def sample(self, masks: IntColumn) -> None:
        """Queue the rest of the step that was run last, given a mask for each masked row."""
        step = self._unsampled
        assert step is not None
        self._unsampled = None
        sampled = self.sample_masked(step.logits, step.plan, masks)
        step.sampled.append(self._fetch(step, sampled))

    def _fetch(self, step: Unsampled, sampled: Sampled) -> Pending[StepResult]:
        results = step.results
        if step.kept is not None:
            names = ("logprob_ids", "logprobs", "ranks")
            results |= dict(zip(names, step.kept.of(sampled.tokens), strict=True))
        tokens = sampled.tokens if sampled.host is None else sampled.host
        fetched, given = self.tables.device.fetch(tokens, *results.values()), list(results)
        return Pending(lambda: self._result(fetched, given, step.processed))

    def _run_model(self, plan: StepPlan, results: dict[str, Tensor]) -> StepLogits:
        """Return logits; what else is wanted of hidden states goes to the results."""
        scored, pooled = self.prompt_logprobs.wanted(plan), self.pooled_prompts.wanted(plan)
        if not scored and not pooled:
            return self.forward(plan)
        logits, hidden = self.eager.with_states(plan)
        if self.steps is not None:
            self.steps.note(plan)
        if scored:
            names = ("prompt_ids", "prompt_logprobs", "prompt_ranks")
            results |= dict(zip(names, self.prompt_logprobs.of(hidden, scored), strict=True))
        vectors = self.pooled_prompts.of(hidden, pooled) if pooled else None
        if vectors is not None:
            results["pooled"] = vectors
        return logits

    def _result(
        self,
        fetched: Pending[list[np.ndarray]],
        names: list[str],
        processed: ProcessedRows | None,
    ) -> StepResult:
        tokens, *others = fetched.result()
        if self.steps is not None and self.steps.has_lost_step():
            return StepResult(tokens[:, None], is_lost=True)
        failures = None
        if processed is not None:
            processed.note(tokens)
            failures = processed.failures
        arrays: dict[str, Any] = dict(zip(names, others, strict=True))
        return StepResult(tokens[:, None], **arrays, failures=failures)
