"""When a core that failed is started anew: at once, later the more often it fails, or never."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_SECONDS = 10.0  # a core that fails earlier may never do better
MAX_SOON = 6  # failures of that kind in a row
LONGEST_DELAY = 30.0


class Restarts:
    """Made when the first core is ready; told when others are, and when one fails."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_restarts = 0
        self._clock = clock
        self._num_soon = 0  # failures since a core lasted
        self._ready_at: float | None = clock()  # None while there is none

    def ready(self) -> None:
        self.num_restarts += 1
        self._ready_at = self._clock()

    def delay(self) -> float | None:
        """Seconds to wait now that a core failed; None when there is no point in another one."""
        has_lasted = self._ready_at is not None and self._clock() - self._ready_at > SOON_SECONDS
        self._ready_at = None
        self._num_soon = 1 if has_lasted else self._num_soon + 1
        if self._num_soon >= MAX_SOON:
            return None
        return min(2.0 ** (self._num_soon - 2), LONGEST_DELAY) if self._num_soon > 1 else 0.0
