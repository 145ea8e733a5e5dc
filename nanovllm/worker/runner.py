"""StepPlan in, tokens out: the device side of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.platforms.base import PendingTokens
from nanovllm.worker.forward import Forward, StepLogits
from nanovllm.worker.input_buffers import InputBuffers

Sampler = Callable[[StepLogits, StepPlan], Tensor]


@dataclass(frozen=True, slots=True)
class PendingStep:
    tokens: PendingTokens
    check: Callable[[], None] | None  # raises if the device could not finish the step

    def result(self) -> StepResult:
        tokens = self.tokens.result()
        if self.check is not None:
            self.check()
        return StepResult(tokens)


class ModelRunner:
    """Runs both halves of a step; masks may change the logits in between."""

    def __init__(
        self,
        buffers: InputBuffers,
        forward: Forward,
        sampler: Sampler,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.buffers, self.forward, self.sampler = buffers, forward, sampler
        self.check = check

    def run(self, plan: StepPlan) -> PendingStep:
        """Queue a step; the tables already hold what the next one will read."""
        self.buffers.update(plan)
        logits = self.forward(plan)
        self.buffers.mask_stop_tokens(logits.values, plan)
        tokens = self.buffers.platform.fetch(self.sampler(logits, plan))
        return PendingStep(tokens, self.check)
