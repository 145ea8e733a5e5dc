"""Supervisor of child processes: a thread that reads their messages and detects crashes and hangs.

The children are processes of this machine, actors of a Ray cluster or, for debugging, a thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from nanovllm import errors
from nanovllm.parallel.child import (
    Channel,
    Failure,
    Kind,
    Message,
    QueueLink,
    Serve,
    StepTimer,
    pack,
    report,
)

# Child processes run this code; multiprocessing would import the user's script again.
_BOOT = (
    "import sys; num = int(sys.argv[1]); numbers = map(int, sys.argv[2:2 + num]); "
    "sys.path[:] = sys.argv[2 + num:]; from {} import main; main(*numbers)"
)
# Absolute path of the folder that contains nanovllm; entries of sys.path may be relative.
PACKAGES = Path(errors.__file__).resolve().parents[1]
FLAGS = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -I, -W ...
# Limit torch's and oneDNN's caches of primitives: an entry may take half a megabyte, and the
# default capacity is 1,024 entries (docs/cpu.md).
CACHE_LIMITS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}

POLL_SECONDS = 0.25  # maximum duration of one wait for messages
HEARTBEAT_TIMEOUT = 4.5  # maximum seconds without a message; heartbeats come every second
GRACE_SECONDS = 0.2  # time to wait for the crash that caused another child's error
STOP_SECONDS = 2.0  # time between SIGTERM and SIGKILL
CLOSE_SECONDS = 5.0  # time for a thread to finish its step; a slower thread is leaked


CLOSED = Failure("the engine is closed; create a new one", "EngineError")


class Children(Protocol):
    names: Sequence[str]
    heartbeat_timeout: float  # seconds
    grace_seconds: float

    def send(self, packed: bytes) -> None:
        """Send the same message to every child without blocking."""

    def receive(self, seconds: float) -> list[tuple[int, Message | Failure]]:
        """Wait for messages; return (child index, message) pairs.

        A Failure means that the child sends nothing more.
        """

    def stop(self) -> None:
        """Stop all children."""

    def close(self) -> None:
        """Close the connections; call this when all children have ended and no thread receives.

        A second call has no effect.
        """


class Supervisor:
    """Supervises children: the first failure stops all of them, and every later `send` raises it.

    `on_reply` and `on_failure` run in the supervisor's thread; `on_failure` is called once.
    """

    def __init__(
        self,
        children: Children,
        on_reply: Callable[[int, Any], None],
        on_failure: Callable[[Failure], None],
        step_timeout: float,
    ) -> None:
        self.failure: Failure | None = None
        # Enables the heartbeat timeout. Off while a model loads, because imports may hold the GIL.
        self.is_armed = False
        self._children = children
        self._on_reply, self._on_failure = on_reply, on_failure
        self._step_timeout = step_timeout  # seconds; 0 disables the watchdog
        self._silence = [0.0] * len(children.names)  # seconds since each child's last message
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant: garbage collection in _fail() may call close()
        self._thread = threading.Thread(target=self._run, name="nanovllm-supervisor", daemon=True)
        self._thread.start()

    def send(self, task: object) -> None:
        self.raise_if_failed()
        self._children.send(pack(task))

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure.error()

    def close(self) -> None:
        """Stop the children; a second call has no effect."""
        if os.getpid() != self._owner:  # a forked process must not stop its parent's children
            return
        self._fail(CLOSED)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            with self._lock:  # two threads may close at the same time
                self._children.close()

    def _run(self) -> None:
        try:
            failure = self._first_failure()
        except Exception as error:  # without a failure, waiters would wait forever
            text = f"cannot read messages from the engine: {error!r}"
            failure = Failure(text, "EngineError", traceback.format_exc())
        self._fail(failure)

    def _first_failure(self) -> Failure:
        """Handle messages until children fail; return the failure that caused the others."""
        failures: dict[int, Failure] = {}  # keyed by child, in order of arrival
        deadline = math.inf
        while self.failure is None and len(failures) < len(self._silence):
            start = time.monotonic()
            if start >= deadline:
                break
            events = self._children.receive(POLL_SECONDS)
            # If this process itself was suspended, that time counts as only one wait.
            waited = min(time.monotonic() - start, POLL_SECONDS)
            self._silence = [seconds + waited for seconds in self._silence]
            found = {number: self._handle(number, event) for number, event in events}
            for number in range(len(self._silence)):
                failure = found.get(number) or self._check_silence(number)
                if failure is not None:
                    failures.setdefault(number, failure)
                    deadline = min(deadline, time.monotonic() + self._children.grace_seconds)
        return self.failure or merge_failures([*failures.values()])

    def _handle(self, number: int, event: Message | Failure) -> Failure | None:
        if isinstance(event, Failure):
            return event
        self._silence[number] = 0.0
        name = self._children.names[number]
        kind, record = event
        if kind is Kind.REPLY:
            self._on_reply(number, record)
        elif kind is Kind.HEARTBEAT:
            if 0 < self._step_timeout < record:
                return Failure(f"{name} did not return from a step for {record:.0f} s")
        elif kind is Kind.LOG:
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        else:
            return reported_failure(name, record)
        return None

    def _check_silence(self, number: int) -> Failure | None:
        timeout = self._children.heartbeat_timeout
        if not (self.is_armed and self._step_timeout) or self._silence[number] <= timeout:
            return None
        return Failure(f"{self._children.names[number]} sent no heartbeat for {timeout:.1f} s")

    def _fail(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self._on_failure(failure)
        self._children.stop()


def reported_failure(name: str, failure: Failure) -> Failure:
    """Add the child's name and the error type to a message, unless the type is in `errors.py`."""
    if hasattr(errors, failure.type_name):
        return replace(failure, message=failure.message.strip() or failure.type_name)
    # Keep only the first line: the traceback contains the whole message.
    parts = f"{name} failed", failure.type_name, failure.message.strip().partition("\n")[0]
    return replace(failure, message=": ".join(filter(None, parts)))


def merge_failures(failures: list[Failure]) -> Failure:
    """Return a crash or hang, plus the first reported error, or else the earliest error."""
    first, *_ = sorted(failures, key=lambda failure: failure.time)
    reported = [failure.traceback for failure in failures if failure.traceback]
    if first.traceback or not reported:
        return first
    return replace(first, message=f"{first.message}\nAnother worker's error:\n{reported[0]}")


@dataclass(frozen=True, slots=True)
class ChildProcess:
    process: subprocess.Popen[bytes]
    channel: Channel


class ChildProcesses:
    """Processes on this machine that run `main(fd, parent_pid, *numbers)` of a module."""

    heartbeat_timeout, grace_seconds = HEARTBEAT_TIMEOUT, GRACE_SECONDS

    def __init__(self, module: str, names: Sequence[str], numbers: Sequence[Sequence[int]]) -> None:
        self.names = names
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._children: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        try:
            for index, each in enumerate(numbers):
                child = start_child(module, *each)
                self._children.append(child)
                self._selector.register(child.channel.connection, selectors.EVENT_READ, index)
        except BaseException:
            self.stop()
            self.close()
            raise
        # Sending has its own thread, as it blocks if a long prompt exceeds a socket's buffer.
        threading.Thread(target=self._send_all, name="nanovllm-sender", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def send(self, packed: bytes) -> None:
        self._outbox.put(packed)

    def receive(self, seconds: float) -> list[tuple[int, Message | Failure]]:
        numbers: list[int] = [key.data for key, _ in self._selector.select(seconds)]
        return [(number, self._receive(number)) for number in numbers]

    def stop(self) -> None:
        """Terminate the processes, and kill those that do not exit in time."""
        for signal in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for child in self._children:
                signal(child.process)
            deadline = time.monotonic() + STOP_SECONDS
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        self._outbox.put(None)
        self._selector.close()
        for child in self._children:
            child.channel.connection.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # a closed socket: `receive` reports the cause
            while (packed := self._outbox.get()) is not None:
                for child in self._children:
                    child.channel.send_packed(packed)

    def _receive(self, number: int) -> Message | Failure:
        child = self._children[number]
        message: Message | None = child.channel.receive()
        if message is not None:
            return message
        self._selector.unregister(child.channel.connection)
        try:
            code = child.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            cause = "closed its connection"
        else:
            cause = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        name = f"{self.names[number]} (process {child.process.pid})"
        return Failure(f"{name} {cause}; its stderr may say why")


def start_child(module: str, *numbers: int) -> ChildProcess:
    ours, theirs = Pipe()
    with theirs:
        arguments = [str(number) for number in (theirs.fileno(), os.getpid(), *numbers)]
        command = [sys.executable, *FLAGS, "-c", _BOOT.format(module), str(len(arguments))]
        process = subprocess.Popen(
            [*command, *arguments, *sys.path, str(PACKAGES)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**CACHE_LIMITS, **os.environ},
            start_new_session=True,  # only the parent receives Ctrl-C from the terminal
        )
    return ChildProcess(process, Channel(ours))


class ChildThread:
    """A thread of this process in place of a child process, so that a debugger can pause it."""

    heartbeat_timeout, grace_seconds = math.inf, 0.0

    def __init__(self, name: str, serve: Serve) -> None:
        self.names: Sequence[str] = [name]
        self.pids = [os.getpid()]
        self._link = QueueLink()
        self._thread = threading.Thread(
            target=self._run, args=[serve], name="nanovllm-core", daemon=True
        )
        self._thread.start()

    def send(self, packed: bytes) -> None:
        self._link.inbox.put(packed)

    def receive(self, seconds: float) -> list[tuple[int, Message | Failure]]:
        try:
            return [(0, pickle.loads(self._link.outbox.get(timeout=seconds)))]
        except Empty:
            return []

    def stop(self) -> None:
        self._link.inbox.put(None)
        self._thread.join(CLOSE_SECONDS)

    def close(self) -> None:
        pass

    def _run(self, serve: Serve) -> None:
        try:
            serve(self._link, StepTimer())
        except BaseException as error:  # including a debugger's quit command
            report(self._link, error)
