"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.pending import Pending
from nanovllm.worker.forward import Forward, StepLogits
from nanovllm.worker.logits_edits import LogitsEdits
from nanovllm.worker.logprobs import Logprobs
from nanovllm.worker.tables import SlotTables

Sampler = Callable[[StepLogits, StepPlan], Tensor]


@dataclass(eq=False)
class ModelRunner:
    """Runs the model, then samples; logits may be edited in between."""

    tables: SlotTables
    forward: Forward
    sampler: Sampler
    check: Callable[[], None] | None = None  # raises if the device could not finish a step

    def __post_init__(self) -> None:
        self.edits = LogitsEdits(self.tables)
        self.logprobs = Logprobs(self.tables)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Queue a step; the tables already hold what the next one will read."""
        self.tables.update(plan)
        logits = self.forward(plan)  # first: the device has work while the host prepares the rest
        self.edits.update(plan)
        self.logprobs.update(plan)
        kept = self.logprobs.keep(logits.values, plan)
        self.edits.apply(logits.values, plan)
        tokens = self.sampler(logits, plan)
        results = (tokens,) if kept is None else (tokens, *kept.of(tokens))
        fetched = self.tables.platform.fetch(*results)
        return Pending(lambda: self._result(fetched))

    def _result(self, fetched: Pending[list[np.ndarray]]) -> StepResult:
        tokens, *logprobs = fetched.result()
        if self.check is not None:
            self.check()
        return StepResult(tokens[:, None], *logprobs)
