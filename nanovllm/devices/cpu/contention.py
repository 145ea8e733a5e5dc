"""Choose how many threads run a step; other processes may compete for the cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Threads spin at the barrier after every kernel. Without contention, CPU time is therefore wall
# time times the number of threads. If it is below this fraction of that product, processes compete
# for the cores.
FAIR_SHARE = 0.8
MIN_PAUSE, MAX_PAUSE = 8, 64  # steps between two checks; a check uses all threads, and may be slow
# Durations are compared per token. A step of one token takes about as long as 12 tokens of a
# prefill chunk, because both read all weights once.
FIXED_TOKENS = 12


def read_idle_seconds() -> float | None:
    """Return the idle time of all cores since the machine started; None except on Linux."""
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    return int(total.split()[4]) / os.sysconf("SC_CLK_TCK")


class ThreadChooser:
    """Chooses between all threads and a single one by comparing the durations of recent steps.

    A thread that loses its core for a moment makes all others wait at the next barrier. If this
    happens in every kernel, a single thread is several times faster, as
    benchmarks/engine/cpu_choices.py shows.
    """

    def __init__(
        self, num_threads: int, idle_seconds: Callable[[], float | None] = read_idle_seconds
    ) -> None:
        self.num_threads = num_threads
        self._idle_seconds = idle_seconds  # total of all cores, since any time in the past
        self._most = num_threads
        # While a single thread is tried: seconds per token of the last step on all threads.
        # Otherwise None.
        self._seconds: float | None = None
        self._num_left = 0  # steps until the next check
        self._pause = MIN_PAUSE
        # Totals over the last MIN_PAUSE steps before a check, and the idle time before them.
        self._rest_seconds = self._rest_cpu_seconds = 0.0
        self._idle_before: float | None = None

    @contextmanager
    def limit(self, num_tokens: int) -> Iterator[None]:
        """Limit torch to the chosen number of threads.

        If a step of `num_tokens` tokens runs in this context, measure it for the next choice.
        """
        before, is_limited = torch.get_num_threads(), self.num_threads < torch.get_num_threads()
        if is_limited:
            torch.set_num_threads(self.num_threads)
        start, used = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            if is_limited:
                torch.set_num_threads(before)
        if num_tokens and self._most > 1:
            self.note(time.perf_counter() - start, time.process_time() - used, num_tokens)

    def note(self, seconds: float, cpu_seconds: float, num_tokens: int = 1) -> None:
        per_token = seconds / (FIXED_TOKENS + num_tokens)
        if self._seconds is not None:
            self._compare(per_token)
        elif self._num_left > 0:
            self._rest(seconds, cpu_seconds)
        elif cpu_seconds < FAIR_SHARE * seconds * self._most:
            self._seconds, self.num_threads = per_token, 1
        else:
            self._pause = MIN_PAUSE

    def _rest(self, seconds: float, cpu_seconds: float) -> None:
        """Count down to the next check; postpone it if a single thread runs and no core is idle."""
        self._num_left -= 1
        if self._num_left == MIN_PAUSE - 1:
            self._idle_before = self._idle_seconds()
        if self._num_left < MIN_PAUSE:
            self._rest_seconds += seconds
            self._rest_cpu_seconds += cpu_seconds
        if self._num_left > 0:
            return
        is_robbed = self._rest_cpu_seconds < FAIR_SHARE * self._rest_seconds
        if self.num_threads == 1 and (is_robbed or not self._has_idle_cores()):
            self._num_left = MIN_PAUSE
        else:
            self.num_threads = self._most
        self._rest_seconds = self._rest_cpu_seconds = 0.0

    def _has_idle_cores(self) -> bool:
        """Whether the cores for the other threads were idle; True if that is unknown.

        With all threads, a prefill step may take many times as long as with one, because they wait
        for each other in every operation.
        """
        idle_now = self._idle_seconds()
        if idle_now is None or self._idle_before is None:
            return True
        needed_seconds = FAIR_SHARE * (self._most - 1) * self._rest_seconds
        return idle_now - self._idle_before >= needed_seconds

    def _compare(self, seconds: float) -> None:
        """Keep the faster choice for a pause, which doubles while the contention persists."""
        assert self._seconds is not None
        self.num_threads = 1 if seconds < self._seconds else self._most
        self._seconds, self._num_left = None, self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
