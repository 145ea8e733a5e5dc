"""One of the engines that answer together: its core, what that shows, and what takes its place."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

from nanovllm.config import EngineConfig
from nanovllm.engine.request import CoreStep
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.executor.child import Serve
from nanovllm.serving.core_client import CoreClient
from nanovllm.serving.core_records import CoreReady, CoreStats, CoreUpdate
from nanovllm.serving.viewers import Viewers

SOON_SECONDS = 10.0  # a core that fails earlier may never do better
MAX_SOON = 6  # failures of that kind in a row
LONGEST_DELAY = 30.0

STARTED_ANEW = "it is started anew"
GIVEN_UP = f"{MAX_SOON} in a row lasted less than {SOON_SECONDS:.0f} s, so no more are started"

logger = logging.getLogger(__name__)


class Replica:
    """Its core may be replaced. `on_lost` and `on_back` are called with the lock."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        lock: threading.Lock,
        on_step: Callable[[Replica, CoreStep], None],
        on_lost: Callable[[Replica, NanovllmError], None],
        on_back: Callable[[Replica], None],
        serve: Serve | None = None,
    ) -> None:
        self.number = number
        self.stats = CoreStats()
        self.error: NanovllmError | None = None  # why it cannot answer, for now or for good
        self.ready: CoreReady | None = None
        self.viewers = Viewers(lambda is_on: self.core.watch(is_on))
        self._config, self._lock = config, lock
        self._on_step, self._on_lost, self._on_back = on_step, on_lost, on_back
        self._serve = serve
        self._closing = threading.Event()
        self._restarts: Restarts | None = None
        self._start()

    @property
    def num_restarts(self) -> int:
        """Cores that took the place of others."""
        return 0 if self._restarts is None else self._restarts.num_restarts

    @property
    def max_len(self) -> int:
        """Where its sequences end."""
        assert self.ready is not None
        return self.ready.max_len

    def wait_until_ready(self) -> CoreReady:
        self.ready = self.core.ready.result()
        return self.ready

    def begin(self, restart_core: bool) -> None:
        """From now on a core that fails may be replaced; raises if it failed before."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._restarts = Restarts() if restart_core else None

    def close(self, reason: NanovllmError | None = None) -> None:
        """End its core; whoever waits for it gets the reason."""
        self._closing.set()
        if reason is not None:
            self._fail(reason)
        with self._lock:
            core = self.core
        core.close()

    def _start(self) -> None:
        self.core = CoreClient(self._config, self._update, self._fail, self.number, self._serve)
        self._at_exit = weakref.finalize(self, _close, self._closing, self.core)

    def _update(self, update: CoreUpdate) -> None:
        """In the core's thread: note how it is, and hand its step on."""
        self.stats = update.stats
        if update.state is not None:
            self.viewers.push(update.state)
        self._on_step(self, update.step)

    def _fail(self, error: NanovllmError) -> None:
        """In the core's thread: tell everybody, and see to another core if there is to be one."""
        delay = None
        with self._lock:
            if not self._closing.is_set():
                if self._restarts is not None:
                    delay = self._restarts.delay()
                    outlook = GIVEN_UP if delay is None else STARTED_ANEW
                    what, *traceback = str(error).split("\n", 1)
                    error = EngineError("\n".join([f"{what}; {outlook}", *traceback]))
                if self.ready is not None:  # or whoever starts it gets the error
                    logger.error("%s", error)
            self.error = error
            stats = self.stats
            free = {"num_running": 0, "num_waiting": 0, "num_free_blocks": stats.num_blocks}
            self.stats = replace(stats, **free)
            self._on_lost(self, error)
        self.viewers.fail(error)
        if delay is not None:
            threading.Thread(target=self._restart, args=[delay], daemon=True).start()

    def _restart(self, delay: float) -> None:
        """In a thread of its own: put another core in the place of the one that failed."""
        self.core.close()  # returns once its process is gone, and what it held is free
        self._closing.wait(delay)
        with self._lock:
            if self._closing.is_set():
                return
            self._at_exit.detach()
            self._start()
            core = self.core
        try:
            ready = core.ready.result()
        except NanovllmError:
            return  # `_fail` was told, and sees to the next one
        with self._lock:
            if core.has_failed:
                return
            assert self._restarts is not None
            self._restarts.ready()
            self.ready, self.error = ready, None
            self._on_back(self)
        logger.warning("%s was started anew (process %d)", core.name, core.pid)


def _close(closing: threading.Event, core: CoreClient) -> None:
    closing.set()  # nothing takes its place
    core.close()


class Restarts:
    """When a core that failed is started anew: at once, later if others failed soon, or never.

    Made when the first core is ready.
    """

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
