"""The one bridge between the engine core and the workers that run its plans."""

from __future__ import annotations

from typing import Protocol

from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.pending import Pending


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def start(self) -> ExecutorInfo:
        """Build the workers and say what they found."""

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step without waiting for it; with masked rows it is not sampled yet."""

    def sample(self, masks: IntColumn) -> None:
        """Sample the plan submitted last, given a mask for each of its masked rows."""

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        """Return memory for masks; `sample` has read it once the step's result is there."""

    def capture_one(self) -> bool:
        """While idle: capture a graph that later requests may replay; False if none is missing."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
