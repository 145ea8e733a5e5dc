"""An engine core in a thread of its front's process, where a debugger can pause it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from nanovllm.config import EngineConfig
from nanovllm.engine.found_model import FoundModel
from nanovllm.engine.request import Request
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.serving.core_process import Command, run_core
from nanovllm.serving.core_records import Add, CoreReady, CoreUpdate, Finish, Watch

CLOSED = "the engine is closed; make a new one"
CLOSE_SECONDS = 5.0  # for the step that runs; a core that is paused for longer is left behind


class CoreThread:
    """Takes the place of a CoreClient, without a watchdog."""

    name = "the engine core"

    def __init__(
        self,
        config: EngineConfig,
        on_update: Callable[[CoreUpdate], None],
        on_failure: Callable[[NanovllmError], None],
        replica: int = 0,
    ) -> None:
        assert replica == 0, "one process has one core"
        self._config, self._on_update, self._on_failure = config, on_update, on_failure
        self._failure: NanovllmError | None = None
        self._failing = threading.Lock()
        self._first: SimpleQueue[object] = SimpleQueue()  # None: it failed
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanovllm-core", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def wait_until_found(self) -> FoundModel:
        found = self._wait()
        assert isinstance(found, FoundModel)
        return found

    def wait_until_ready(self) -> CoreReady:
        ready = self._wait()
        assert isinstance(ready, CoreReady)
        return ready

    def add(self, requests: list[Request]) -> None:
        self._inbox.put(Add(requests))

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self, finish: Finish) -> None:
        self._inbox.put(finish)

    def watch(self, is_on: bool) -> None:
        self._inbox.put(Watch(is_on))

    def close(self) -> None:
        """End the core; a second call does nothing."""
        self._fail(EngineError(CLOSED))
        self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _wait(self) -> object:
        record = self._first.get()
        if record is None:
            assert self._failure is not None
            raise self._failure
        return record

    def _run(self) -> None:
        try:
            run_core(self._config, self._inbox, self._send, contextlib.nullcontext())
        except NanovllmError as error:
            self._fail(error)
        except BaseException as error:  # a debugger was told to quit, for instance
            failure = EngineError(f"{self.name} failed: {error!r}")
            failure.__cause__ = error
            self._fail(failure)

    def _send(self, record: object) -> None:
        if not isinstance(record, CoreUpdate):
            self._first.put(record)
        elif self._failure is None:
            self._on_update(record)

    def _fail(self, error: NanovllmError) -> None:
        """Note the first failure, and report it."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        self._on_failure(error)
        self._first.put(None)
        self._first.put(None)
