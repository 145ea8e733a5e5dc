"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.logits.edits import LogitsEdits
from nanovllm.logits.logprobs import Logprobs, PromptLogprobs
from nanovllm.pending import Pending
from nanovllm.worker.forward import EagerForward, Forward, StepLogits

Sampler = Callable[[StepLogits, StepPlan], Tensor]


@dataclass(eq=False)
class ModelRunner:
    """Runs the model, then samples; logits may be edited in between."""

    eager: EagerForward
    forward: Forward  # the same, or what replays steps
    sampler: Sampler
    check: Callable[[], None] | None = None  # raises if the device could not finish a step
    note: Callable[[StepPlan], None] | None = None  # tells `forward` of a plan that it does not run

    def __post_init__(self) -> None:
        self.tables = self.eager.tables
        self.edits = LogitsEdits(self.tables)
        self.logprobs = Logprobs(self.tables)
        self.prompt_logprobs = PromptLogprobs(self.eager)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a step; the tables already hold what the next one will read."""
        self.prompt_logprobs.update(plan)
        if plan.block_copies:
            self.eager.copy_blocks(plan)
        results: dict[str, Tensor] = {}
        if rows := self.prompt_logprobs.wanted(plan):
            self.tables.update(plan)
            logits, scores = self.prompt_logprobs.run(plan, rows)
            if self.note is not None:
                self.note(plan)
            names = ("prompt_ids", "prompt_logprobs", "prompt_ranks")
            results |= dict(zip(names, scores, strict=True))
        else:
            logits = self.forward(plan)
        self.edits.update(plan)  # not before: the device has its work by now
        self.logprobs.update(plan)
        kept = self.logprobs.keep(logits.values, plan)
        self.edits.apply(logits.values, plan)
        tokens = self.sampler(logits, plan)
        if kept is not None:
            names = ("logprob_ids", "logprobs", "ranks")
            results |= dict(zip(names, kept.of(tokens), strict=True))
        fetched, given = self.tables.platform.fetch(tokens, *results.values()), list(results)
        return Pending(lambda: self._result(fetched, given))

    def _result(self, fetched: Pending[list[np.ndarray]], names: list[str]) -> StepResult:
        tokens, *others = fetched.result()
        if self.check is not None:
            self.check()
        return StepResult(tokens[:, None], **dict(zip(names, others, strict=True)))
