"""The front's side of an engine core that runs in a child process, or in a thread for debugging."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from nanovllm.config import EngineConfig
from nanovllm.engine.request import Request
from nanovllm.engine.start import FoundModel
from nanovllm.errors import NanovllmError
from nanovllm.executor.child import Failure, Serve
from nanovllm.executor.supervisor import ChildProcesses, ChildThread, Supervisor
from nanovllm.serving.core_records import (
    Add,
    CoreReady,
    CoreUpdate,
    Finish,
    StartCore,
    Watch,
)


class CoreClient:
    """Updates and the failure, if any, come in the supervisor's thread."""

    def __init__(
        self,
        config: EngineConfig,
        on_update: Callable[[CoreUpdate], None],
        on_failure: Callable[[NanovllmError], None],
        replica: int = 0,
        serve: Serve | None = None,  # in a thread of this process; None: in a child process
    ) -> None:
        self._on_update = on_update
        self._on_failure = on_failure
        self.found: Future[FoundModel] = Future()
        self.ready: Future[CoreReady] = Future()
        self._added: list[Request] = []  # not sent yet
        self._num_added_tokens = 0
        # For two steps: the second is planned while the first one runs.
        self._enough_tokens = 2 * config.max_num_batched_tokens
        self._adding = threading.Lock()
        is_alone = config.data_parallel_size == 1
        self.name = "the engine core" if is_alone else f"engine core {replica}"
        children: ChildProcesses | ChildThread
        if serve is not None:
            children, timeout = ChildThread(self.name, serve), 0.0
        else:
            level = logging.getLogger("nanovllm").getEffectiveLevel()
            children = ChildProcesses("nanovllm.serving.core_process", [self.name], [[level]])
            # Workers of several ranks have their own watchdog, which names the one that hangs.
            timeout = config.step_timeout and config.step_timeout + 5.0
        self.pid = children.pids[0]
        self._supervisor = Supervisor(children, self._receive, self._fail, timeout)
        self._send(StartCore(config, replica))

    @property
    def has_failed(self) -> bool:
        return self._supervisor.failure is not None

    def add(self, requests: list[Request]) -> None:
        """Take requests, which `flush` sends; enough to keep the core busy go at once, together."""
        with self._adding:
            self._added += requests
            self._num_added_tokens += sum(len(each.token_ids) for each in requests)
            if self._num_added_tokens >= self._enough_tokens:
                self._send_added()

    def flush(self) -> None:
        with self._adding:
            self._send_added()

    def finish(self, finish: Finish) -> None:
        self.flush()  # the core must know of them first
        self._send(finish)

    def watch(self, is_on: bool) -> None:
        self._send(Watch(is_on))

    def close(self) -> None:
        """End the core; a second call does nothing."""
        self._supervisor.close()

    def _send_added(self) -> None:
        added, self._added, self._num_added_tokens = self._added, [], 0
        if added:
            self._send(Add(added))

    def _send(self, record: object) -> None:
        with contextlib.suppress(NanovllmError):  # `on_failure` receives the reason
            self._supervisor.send(record)

    def _receive(self, _: int, record: CoreUpdate | FoundModel | CoreReady) -> None:
        if isinstance(record, CoreUpdate):
            if not self.has_failed:
                self._on_update(record)
        elif isinstance(record, FoundModel):
            self.found.set_result(record)
        else:
            self._supervisor.is_armed = True
            self.ready.set_result(record)

    def _fail(self, failure: Failure) -> None:
        self._on_failure(failure.error())
        for future in (self.found, self.ready):
            if not future.done():
                future.set_exception(failure.error())
