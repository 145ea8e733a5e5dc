"""A core in another process, as its front sees it, who is told when it dies or hangs."""

from __future__ import annotations

import logging
import pickle
import select
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

from nanovllm.config import EngineConfig
from nanovllm.engine.found_model import FoundModel
from nanovllm.engine.request import Request
from nanovllm.errors import NanovllmError
from nanovllm.executor.channel import Kind, pack
from nanovllm.executor.child_process import Failure, Watchdog, death, hear, start_child, stop
from nanovllm.serving.core_records import Add, CoreReady, CoreUpdate, Finish, StartCore, Watch

WAIT_SECONDS = 0.25  # after which a pause of this process is noticed
MESSAGE_SECONDS = 3.0  # within a message: a core that stops there hangs
CLOSED = Failure("the engine is closed; make a new one", "EngineError")


class CoreClient:
    """Sending never waits for the core; what it says comes in one thread, step by step."""

    def __init__(
        self,
        config: EngineConfig,
        on_update: Callable[[CoreUpdate], None],
        on_failure: Callable[[NanovllmError], None],
        replica: int = 0,
    ) -> None:
        self._on_update = on_update
        self._on_failure = on_failure
        self._failure: Failure | None = None
        self._failing = threading.RLock()
        self._first: SimpleQueue[FoundModel | CoreReady | None] = SimpleQueue()  # None: it failed
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._added: list[Request] = []  # not sent yet
        self._num_added_tokens = 0
        # For two steps: the second is planned while the first one runs.
        self._enough_tokens = 2 * config.max_num_batched_tokens
        self._adding = threading.Lock()
        is_alone = config.data_parallel_size == 1
        self.name = "the engine core" if is_alone else f"engine core {replica}"
        self._child = start_child("nanovllm.serving.core_process", self.name)
        self._child.channel.set_receive_timeout(MESSAGE_SECONDS)
        # Workers of several ranks have their own watchdog, which names the one that hangs.
        timeout = config.step_timeout and config.step_timeout + 5.0
        self._watchdog = Watchdog(self.name, self.pid, timeout, WAIT_SECONDS)
        self._threads = [
            threading.Thread(target=target, name="nanovllm-core", daemon=True)
            for target in (self._receive_all, self._send_all)
        ]
        for thread in self._threads:
            thread.start()
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        self._send(StartCore(config, level, replica))

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def wait_until_found(self) -> FoundModel:
        found = self._first.get()
        if found is None:
            raise self.failure()
        assert isinstance(found, FoundModel)
        return found

    def wait_until_ready(self) -> CoreReady:
        ready = self._first.get()
        if ready is None:
            raise self.failure()
        assert isinstance(ready, CoreReady)
        return ready

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

    def failure(self) -> NanovllmError:
        assert self._failure is not None
        return self._failure.error()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """End the core; a second call does nothing."""
        self._fail(CLOSED)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _send_added(self) -> None:
        added, self._added, self._num_added_tokens = self._added, [], 0
        if added:
            self._send(Add(added))

    def _send(self, record: object) -> None:
        body = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        self._outbox.put(pack(Kind.TASK, [body]))

    def _send_all(self) -> None:
        while (packed := self._outbox.get()) is not None:
            try:
                self._child.channel.send(packed)
            except OSError:
                return  # the other thread sees that end too, and finds out why

    def _receive_all(self) -> None:
        try:
            self._listen()
        except Exception as error:  # or whoever waits would wait for ever
            text = f"the engine's answers cannot be read: {error!r}"
            self._fail(Failure(text, "EngineError", traceback.format_exc()))
        self._child.channel.close()

    def _listen(self) -> None:
        while self._failure is None:
            start = time.monotonic()
            ready, _, _ = select.select([self._child.channel], [], [], WAIT_SECONDS)
            waited = time.monotonic() - start
            failure = self._receive() if ready else self._watchdog.waited(waited)
            if failure is not None:
                self._fail(failure)

    def _receive(self) -> Failure | None:
        message = self._child.channel.receive()
        if message is None:
            return death(self._child)
        if message.kind is not Kind.REPLY:
            return self._watchdog.heard(message) or hear(self._child, message)
        self._watchdog.heard(message)
        record = pickle.loads(message.body)
        if isinstance(record, CoreUpdate):
            self._on_update(record)
        else:
            self._watchdog.is_armed = isinstance(record, CoreReady)
            self._first.put(record)
        return None

    def _fail(self, failure: Failure) -> None:
        """Note the first failure, tell of it, then end the process."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = failure
        self._on_failure(failure.error())
        self._first.put(None)
        self._first.put(None)
        self._outbox.put(None)
        stop([self._child.process])
