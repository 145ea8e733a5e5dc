"""How many threads a program runs on, where other programs may keep the cores busy."""

from __future__ import annotations

import time
from collections.abc import Callable

# Threads that meet after every kernel spin while they wait, so on idle cores they use all of them.
# A smaller share of their time than this and others have taken cores away.
FAIR_SHARE = 0.8
MIN_PAUSE, MAX_PAUSE = 8, 64  # runs from one look to the next; each look may be a slow run


class Pace:
    """Chooses between all threads and one, by what the last runs took.

    A thread that has lost its core for a moment makes all others wait, in every kernel anew: then
    one thread alone is several times faster. benchmarks/engine/cpu_choices.py measures it.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._most = num_threads
        # What the last run on all threads took, while one thread is being tried.
        self._seconds: float | None = None
        self._num_left = 0  # runs until the next look
        self._pause = MIN_PAUSE
        self._rest_seconds = self._rest_cpu_seconds = 0.0  # of the last runs before a look

    def run(self, call: Callable[[int], object]) -> None:
        """Call with a number of threads; how long it takes decides about the next ones."""
        if self._most == 1:
            call(1)
            return
        start, used = time.perf_counter(), time.process_time()
        call(self.num_threads)
        self.note(time.perf_counter() - start, time.process_time() - used)

    def note(self, seconds: float, cpu_seconds: float) -> None:
        if self._seconds is not None:
            self._compare(seconds)
        elif self._num_left > 0:
            self._rest(seconds, cpu_seconds)
        elif cpu_seconds < FAIR_SHARE * seconds * self._most:
            self._seconds, self.num_threads = seconds, 1
        else:
            self._pause = MIN_PAUSE

    def _rest(self, seconds: float, cpu_seconds: float) -> None:
        """Wait for the next look; where one thread alone is robbed of its core, put it off."""
        self._num_left -= 1
        if self._num_left < MIN_PAUSE:
            self._rest_seconds += seconds
            self._rest_cpu_seconds += cpu_seconds
        if self._num_left > 0:
            return
        is_robbed = self._rest_cpu_seconds < FAIR_SHARE * self._rest_seconds
        if self.num_threads == 1 and is_robbed:
            self._num_left = MIN_PAUSE
        else:
            self.num_threads = self._most
        self._rest_seconds = self._rest_cpu_seconds = 0.0

    def _compare(self, seconds: float) -> None:
        """Stay with the faster one for a while, longer each time that nothing has changed."""
        assert self._seconds is not None
        self.num_threads = 1 if seconds < self._seconds else self._most
        self._seconds, self._num_left = None, self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
