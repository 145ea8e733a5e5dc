"""The processes behind an executor: how they start, what they are sent, and how they end.

Two threads talk to them, so that sending never waits for a worker that is busy, a fault is noticed
while nobody waits, and Ctrl-C, which only reaches the main thread, cannot cut a message in two.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Protocol

import torch

from nanovllm.devices.choose import check_num_ranks
from nanovllm.distributed.store import HOST, host_store
from nanovllm.errors import EngineError
from nanovllm.executor.channel import Kind, pack
from nanovllm.executor.child_process import (
    STOP_SECONDS,
    ChildProcess,
    Failure,
    Watchdog,
    death,
    hear,
    start_child,
    stop,
)
from nanovllm.executor.codec import Section
from nanovllm.executor.worker_main import Site

Reply = Future[bytearray]
GRACE_SECONDS = 0.2  # for the death to show that explains another worker's error
POLL_SECONDS = 1.0  # between looks at processes whose end of the socket may outlive them


class Workers(Protocol):
    """Whoever waits when a worker fails is told why, and so is every later caller."""

    def check_room(self, device: str, num_ranks: int) -> None:
        """Raise ConfigError where there is no room for so many workers."""

    def spawn(self, num_ranks: int) -> Site:
        """Start them, and say where they are."""

    def send(self, sections: Iterable[Section], num_replies: int = 1) -> list[Reply]:
        """Send every worker the same, without waiting; the first `num_replies` ranks answer."""

    def raise_if_failed(self) -> None:
        """Raise what ended them, if anything did."""

    def fail(self, message: str) -> None:
        """Give up on workers that do not answer."""

    def close(self) -> None:
        """End them; a second call finds none."""


class WorkerProcesses:
    """Workers on this machine, in children of this process."""

    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._failure: Failure | None = None
        self._workers: list[WorkerProcess] = []
        self._owner = os.getpid()
        self._store: object | None = None  # where they meet, for as long as it is held
        self._outbox: SimpleQueue[Broadcast | None] = SimpleQueue()
        self._stopping = threading.RLock()  # the collector may close us in the midst of it
        self._threads = [
            threading.Thread(target=target, name="nanovllm-workers", daemon=True)
            for target in (self._receive_all, self._send_all)
        ]

    def check_room(self, device: str, num_ranks: int) -> None:
        check_num_ranks(device, num_ranks)

    def spawn(self, num_ranks: int) -> Site:
        self.raise_if_failed()
        store = host_store()
        for rank in range(num_ranks):
            self._workers.append(spawn(rank, num_ranks, self._step_timeout))
        for thread in self._threads:
            thread.start()
        self._store = store
        return Site(HOST, store.port, max(torch.get_num_threads() // num_ranks, 1))

    def send(self, sections: Iterable[Section], num_replies: int = 1) -> list[Reply]:
        self.raise_if_failed()
        task = Broadcast(pack(Kind.TASK, sections), [Reply() for _ in range(num_replies)])
        self._outbox.put(task)
        self.raise_if_failed()  # or else the task is ahead of the end, and its replies are failed
        return task.replies

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure.error()
        if os.getpid() != self._owner:  # without the threads that would hear the workers
            raise EngineError(
                f"the workers of this engine answer to process {self._owner}, from which this one "
                "was forked; make an engine here, or give process pools the 'spawn' method"
            )

    def fail(self, message: str) -> None:
        self._failure = self._failure or Failure(message, "WorkerError")
        for worker in self._workers:
            worker.process.kill()  # one that is stopped would not hear anything else

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child must not end what its parent uses
            return
        self._stop(Failure("the engine is closed; make a new one", "EngineError"))
        self._store = None
        _, sender = self._threads
        if sender.ident is None:  # it never started
            self._close_channels()
        # The collector may call this from one of them.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(STOP_SECONDS)

    def _send_all(self) -> None:
        while (task := self._outbox.get()) is not None:
            for worker, reply in zip(self._workers, task.replies, strict=False):
                worker.awaited.append(reply)
            try:
                for worker in self._workers:
                    worker.channel.send(task.packed)
            except OSError:
                pass  # the other thread sees that end too, and finds out why
        self._close_channels()

    def _close_channels(self) -> None:
        for worker in self._workers:
            worker.channel.close()
            for reply in worker.awaited:
                assert self._failure is not None, "channels close after a failure"
                reply.set_exception(self._failure.error())

    def _receive_all(self) -> None:
        failure = Failure("the engine can no longer listen to its workers", "WorkerError")
        try:
            failure = self._first_failure()
        finally:
            self._stop(failure)
            self._outbox.put(None)

    def _first_failure(self) -> Failure:
        """Hand out replies until workers fail; return what came first."""
        failures: list[Failure] = []
        deadline = None
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                for worker, failure in listen(
                    selector, GRACE_SECONDS if failures else POLL_SECONDS
                ):
                    selector.unregister(worker.channel)
                    failures.append(failure)
                    deadline = deadline or time.monotonic() + GRACE_SECONDS
        return join_failures(failures)

    def _stop(self, failure: Failure) -> None:
        with self._stopping:
            self._failure = self._failure or failure
            stop([worker.process for worker in self._workers])


@dataclass(frozen=True, slots=True)
class Broadcast:
    packed: bytes
    replies: list[Reply]


@dataclass(frozen=True, slots=True)
class WorkerProcess(ChildProcess):
    watchdog: Watchdog
    awaited: deque[Reply] = field(default_factory=deque)  # in the order of its tasks


def spawn(rank: int, num_ranks: int, step_timeout: float) -> WorkerProcess:
    child = start_child("nanovllm.executor.worker_main", f"worker {rank} of {num_ranks}", rank)
    watchdog = Watchdog(child.name, child.process.pid, step_timeout, POLL_SECONDS)
    return WorkerProcess(child.name, child.process, child.channel, watchdog)


def listen(selector: selectors.BaseSelector, seconds: float) -> list[tuple[WorkerProcess, Failure]]:
    """Wait for messages and deal with them; return the workers that failed, and how.

    A process that a worker forked may hold its socket open, so that it seems to live.
    """
    workers = [key.data for key in selector.get_map().values()]
    ended = [worker for worker in workers if worker.process.poll() is not None]
    start = time.monotonic()
    ready = [key.data for key, _ in selector.select(seconds)]
    waited = time.monotonic() - start
    heard = [(worker, receive(worker)) for worker in ready]
    silent = [worker for worker in workers if worker not in ready]
    heard += [(worker, worker.watchdog.waited(waited)) for worker in silent]
    heard += [(worker, death(worker)) for worker in ended if worker not in ready]
    return [(worker, failure) for worker, failure in heard if failure is not None]


def receive(worker: WorkerProcess) -> Failure | None:
    """Deal with a message that is there; return a failure if it tells of one."""
    message = worker.channel.receive()
    if message is None:
        return death(worker)
    worker.watchdog.heard(message)
    if message.kind is Kind.REPLY:
        worker.watchdog.is_armed = True  # it has loaded its model
        worker.awaited.popleft().set_result(message.body)
        return None
    return hear(worker, message)


def join_failures(failures: list[Failure]) -> Failure:
    """Return what came first; to a death, which says little, the first error that was told."""
    first, *others = sorted(failures, key=lambda failure: failure.time)
    told = next((failure.traceback for failure in others if failure.traceback), None)
    if first.traceback or told is None:
        return first
    return replace(first, message=f"{first.message}\nAnother worker's error:\n{told}")
