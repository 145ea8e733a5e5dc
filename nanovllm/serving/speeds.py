"""How fast an engine is in prefill and in decode, each over the time that it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.outputs import StepOutput


@dataclass(slots=True)
class Phase:
    """Tokens run in prefill or in decode, and the time they took."""

    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class Speeds:
    """Feed it every step as it ends; read it at any time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prefill, self.decode = Phase(), Phase()
        self._clock = clock
        self.step_start = clock()

    def add_step(self, step: StepOutput) -> None:
        """Count a step; one that mixes prefill and decode shares its time out by tokens."""
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        if not num_tokens:  # only fills the pipeline: its time belongs to the step that follows
            return
        now = self._clock()
        seconds_per_token = (now - self.step_start) / num_tokens
        self.prefill.add(step.num_prefill_tokens, step.num_prefill_tokens * seconds_per_token)
        self.decode.add(step.num_decode_tokens, step.num_decode_tokens * seconds_per_token)
        self.step_start = now
