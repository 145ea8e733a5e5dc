"""Client for one engine core in a child process, or in a thread for debugging."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.assembly import ResolvedModel
from nanovllm.config import EngineConfig
from nanovllm.engine.request import EngineCoreOutputs, FinishReason, Request
from nanovllm.errors import ConfigError, NanovllmError
from nanovllm.parallel.child import Failure, Serve
from nanovllm.parallel.supervisor import ChildProcesses, ChildThread, Supervisor
from nanovllm.serve.core_messages import (
    AddRequests,
    Control,
    ControlAction,
    CoreReady,
    CoreStats,
    CoreUpdate,
    FinishSequence,
    SendSnapshots,
)
from nanovllm.validation import has_folder

if TYPE_CHECKING:
    from nanovllm.serve.live.engine_state import EngineState
    from nanovllm.serve.live.subscribers import Subscribers

SOON_SECONDS = 10.0  # a core that runs for longer before it fails resets the failure count
MAX_FAILURES = 6  # consecutive failures after which no new core is started


class Replica:
    """Client side of one data-parallel replica of the engine.

    `on_step` and `on_failure` run in the supervisor's thread; `on_failure` is called once.
    """

    def __init__(
        self,
        config: EngineConfig,
        number: int,
        on_step: Callable[[Replica, EngineCoreOutputs], None],
        on_failure: Callable[[Replica, NanovllmError], None],
        serve: Serve | None = None,  # function to run in a thread; None: start a child process
    ) -> None:
        self.number = number
        self.stats = CoreStats()
        self.error: NanovllmError | None = None  # set while the core is unavailable
        self.max_len = 0  # maximum sequence length in tokens, set once the core is ready
        self.num_restarts = 0
        self._subscribers = self._create_subscribers()
        self.found: Future[ResolvedModel] = Future()
        self._ready: Future[CoreReady] = Future()
        self._ready_time: float | None = None
        self._num_failures = 0  # consecutive failures of previous cores
        self._on_step, self._on_failure = on_step, on_failure
        self._added: list[Request] = []  # requests that have not been sent yet
        self._num_added_tokens = 0
        # Enough tokens for two steps: the second is scheduled while the first runs.
        self._enough_tokens = 2 * config.max_num_batched_tokens
        self._adding = threading.Lock()
        is_alone = config.data_parallel_size == 1
        self.name = "the engine core" if is_alone else f"engine core {number}"
        children: ChildProcesses | ChildThread
        if serve is not None:
            children, timeout = ChildThread(self.name, serve), 0.0
        else:
            level = logging.getLogger("nanovllm").getEffectiveLevel()
            children = ChildProcesses("nanovllm.serve.core_process", [self.name], [[level, number]])
            # Longer than the timeout of tensor-parallel workers: their watchdog names the rank.
            timeout = config.step_timeout and config.step_timeout + 5.0
        self.pid = children.pids[0]
        self._supervisor = Supervisor(children, self._receive, self._fail, timeout)
        self._send(config)

    @property
    def has_failed(self) -> bool:
        return self._supervisor.failure is not None

    def wait_until_ready(self) -> CoreReady:
        ready = self._ready.result()
        self.max_len, self._ready_time = ready.max_len, time.monotonic()
        return ready

    def add(self, requests: list[Request]) -> None:
        """Queue requests until `flush`; send them at once if they suffice to keep the core busy.

        Requests with images always wait for `flush`, which may run in another thread.
        """
        with self._adding:
            self._added += requests
            self._num_added_tokens += sum(len(each.token_ids) for each in requests)
            if self._num_added_tokens >= self._enough_tokens and not requests[0].images:
                self._send_added()

    def flush(self) -> None:
        with self._adding:
            self._send_added()

    def finish(self, seq_id: int, reason: FinishReason) -> None:
        """Ask the core to end a sequence; its next update reports the end."""
        self.flush()  # the core must receive the requests before this message
        self._send(FinishSequence(seq_id, reason))

    def control(self, action: ControlAction) -> None:
        """Pause, step or resume the core. Stepping needs depth 0 (synchronous scheduling)."""
        self.flush()
        self._send(Control(action))

    def watch(self) -> AsyncGenerator[EngineState, None]:
        """Yield snapshots of the core until `end_snapshots` is called."""
        if self._subscribers is None:
            raise ConfigError("the engine cannot be watched: nanovllm/serve/live is missing")
        return self._subscribers.subscribe()

    def end_snapshots(self, error: NanovllmError | None = None) -> None:
        """End the snapshots of all clients, optionally with an error."""
        if self._subscribers is not None:
            self._subscribers.end(error)

    def fail(self, error: NanovllmError) -> None:
        """Record the core's error, and set the statistics to those of an idle engine."""
        self.error = error
        self.stats = replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_free_blocks=self.stats.num_blocks,
            num_held_blocks=(0,) * len(self.stats.num_held_blocks),
        )

    def take_place_of(self, lost: Replica) -> None:
        """Inherit the counters of a failed replica, and its error until this one is ready."""
        self.stats, self.error, self.max_len = lost.stats, lost.error, lost.max_len
        self.num_restarts, self._num_failures = lost.num_restarts, lost._num_failures

    def restart_delay(self) -> float | None:
        """Count a failure, and return the seconds to wait before a restart; None after too many."""
        lasted = 0.0 if self._ready_time is None else time.monotonic() - self._ready_time
        self._num_failures = 1 if lasted > SOON_SECONDS else self._num_failures + 1
        if self._num_failures >= MAX_FAILURES:
            return None
        return 2.0 ** (self._num_failures - 1) - 1

    def close(self) -> None:
        """Stop the core; a second call has no effect."""
        self._supervisor.close()

    def _create_subscribers(self) -> Subscribers | None:
        if not has_folder("nanovllm.serve.live"):
            return None
        from nanovllm.serve.live.subscribers import Subscribers

        return Subscribers(lambda is_on: self._send(SendSnapshots(is_on)))

    def _send_added(self) -> None:
        added, self._added, self._num_added_tokens = self._added, [], 0
        if added:
            self._send(AddRequests(added))

    def _send(self, record: object) -> None:
        with contextlib.suppress(NanovllmError):  # `on_failure` receives the error
            self._supervisor.send(record)

    def _receive(self, _: int, record: CoreUpdate | ResolvedModel | CoreReady) -> None:
        if isinstance(record, CoreUpdate):
            if not self.has_failed:
                self._update(record)
        elif isinstance(record, ResolvedModel):
            self.found.set_result(record)
        else:
            self._supervisor.is_armed = True
            self._ready.set_result(record)

    def _update(self, update: CoreUpdate) -> None:
        self.stats = update.stats
        if update.state is not None:
            assert self._subscribers is not None
            self._subscribers.push(update.state)
        self._on_step(self, update.step)

    def _fail(self, failure: Failure) -> None:
        self._on_failure(self, failure.error())
        for future in (self.found, self._ready):
            if not future.done():
                future.set_exception(failure.error())
