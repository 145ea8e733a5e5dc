"""How long a step may take before whoever waits for it must take it for hung."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.engine.pacing import Sizes, StepCost, step_sizes
from nanovllm.engine.step import ExecutorInfo, StepPlan

FIRST_USE_SECONDS = 60.0  # for a size of step that is new: kernels may be compiled for it
# Of a processor of which nothing is known yet: far less than any has.
FLOPS = {"cpu": 5e9, "cuda": 5e12}
KNOWN_GROWTH = 4  # times the tokens of the largest step so far: beyond, the guess counts as well


@dataclass(frozen=True, slots=True)
class StepInFlight:
    sizes: Sizes
    num_tokens: int
    expected: float  # seconds
    is_first: bool  # of its size
    begin: float


class StepClock:
    """Learns from every step what steps take; plans end in the order they began."""

    def __init__(self, info: ExecutorInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess = 2 * info.num_weights_per_token / FLOPS[info.device]  # seconds of a token
        self._cost = StepCost()
        self._clock = clock
        self._most_tokens = 0
        self._seen: set[tuple[int, int]] = set()
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end = clock()

    def begin(self, plan: StepPlan) -> None:
        sizes, num_tokens = step_sizes(plan), int(plan.counts.sum())
        expected = self._cost.seconds(sizes)
        if num_tokens > KNOWN_GROWTH * self._most_tokens:
            expected = max(expected, num_tokens * self._guess)
        kind = len(plan.counts).bit_length(), num_tokens.bit_length()
        is_first = kind not in self._seen
        self._seen.add(kind)
        step = StepInFlight(sizes, num_tokens, expected, is_first, self._clock())
        self._in_flight.append(step)

    def end(self) -> None:
        step, now = self._in_flight.popleft(), self._clock()
        seconds = now - max(step.begin, self._last_end)
        self._last_end = now
        self._most_tokens = max(self._most_tokens, step.num_tokens)
        if seconds > 0:
            self._cost.observe(step.sizes, step.num_tokens, seconds)

    def limit(self, least: float, factor: float) -> float:
        """Seconds within which the next step is to end; no fewer than `least`."""
        expected = sum(step.expected for step in self._in_flight)
        first_use = FIRST_USE_SECONDS if any(step.is_first for step in self._in_flight) else 0.0
        return max(least, factor * expected) + first_use
