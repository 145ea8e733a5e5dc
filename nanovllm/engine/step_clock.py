"""How long a step may take before whoever waits for it must take it for hung."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.engine.step import ExecutorInfo, StepPlan

# For a step of a new size, for which kernels may be compiled. A CPU has all of them before its
# first step, which touches its memory for the first time.
FIRST_USE_SECONDS = {"cpu": 10.0, "cuda": 60.0}
# Of a processor of which nothing is known yet: far less than any has.
FLOPS = {"cpu": 5e9, "cuda": 5e12}


@dataclass(frozen=True, slots=True)
class StepInFlight:
    num_tokens: int  # as a power of two, like the next
    num_keys: int  # that its rows look back on
    expected: float  # seconds
    first_use: float  # seconds, beside those
    begin: float


class StepClock:
    """Learns from every step what steps of its size take; they end in the order they began."""

    def __init__(self, info: ExecutorInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = info.device
        self._guess = 2 * info.num_weights_per_token / FLOPS[info.device]  # seconds of a token
        self._clock = clock
        self._lock = threading.Lock()  # `end` may be called by a thread that receives replies
        self._longest: dict[int, dict[int, float]] = {}  # by tokens, then by keys: seconds
        self._seen: set[tuple[int, int]] = set()  # rows and tokens, where that matters
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end = clock()

    def begin(self, plan: StepPlan) -> None:
        num_tokens = int(plan.counts.sum())
        tokens, rows = num_tokens.bit_length(), len(plan.counts).bit_length()
        keys = (int(plan.starts.sum()) + num_tokens).bit_length()
        size = (rows, tokens) if self._device == "cuda" else (0, 0)
        first_use = 0.0 if size in self._seen else FIRST_USE_SECONDS[self._device]
        self._seen.add(size)
        with self._lock:
            expected = self._expected(num_tokens, keys)
            self._in_flight.append(StepInFlight(tokens, keys, expected, first_use, self._clock()))

    def end(self, _: object = None) -> None:
        with self._lock:
            step, now = self._in_flight.popleft(), self._clock()
            seconds = now - max(step.begin, self._last_end)
            self._last_end = now
            known = self._longest.setdefault(step.num_tokens, {})
            known[step.num_keys] = max(known.get(step.num_keys, 0.0), seconds)

    def limit(self, least: float, factor: float) -> float:
        """Seconds within which the steps in flight are to end; no fewer than `least`."""
        with self._lock:
            expected = sum(step.expected for step in self._in_flight)
            first_use = max((step.first_use for step in self._in_flight), default=0.0)
        return max(least, factor * expected) + first_use

    def _expected(self, num_tokens: int, keys: int) -> float:
        """Return the seconds that a step of this size should take."""
        tokens = num_tokens.bit_length()
        known = self._longest.get(tokens)
        if known is None:  # a token takes no longer than among fewer
            longest = {size: max(times.values()) for size, times in self._longest.items()}
            rates = [longest[size] / 2 ** (size - 1) for size in longest if size < tokens]
            return num_tokens * float(min([self._guess, *rates]))
        return known.get(keys) or 2 * max(known.values())  # twice the keys take twice as long
