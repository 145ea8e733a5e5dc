"""A child process of the engine, which exchanges messages with its parent and exits with it.

Importing this module must stay fast: during the import, the parent's death goes unnoticed.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from nanovllm import errors
from nanovllm.errors import NanovllmError, WorkerError


class Kind(IntEnum):
    """Kinds of messages from a child to the engine; all messages to a child are tasks."""

    REPLY = 0  # the reply to a task, or an update
    LOG = 1
    ERROR = 2
    HEARTBEAT = 3  # sent every second, with the duration of the current step in seconds


Message = tuple[Kind, Any]


class Link(Protocol):
    """The child's end of a message connection."""

    def send(self, kind: Kind, record: object) -> None:
        """Send a message to the engine; safe to call from any thread."""

    def receive(self) -> Any:
        """Wait for a task; return None when there will be no more."""


class Channel:
    """One end of a socket. Any thread may send, but only one may receive."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, kind: Kind, record: object) -> None:
        self.send_packed(pack((kind, record)))

    def send_packed(self, packed: bytes) -> None:
        """Send a packed message; raise OSError if the other end is closed."""
        with self._sending:
            self.connection.send_bytes(packed)

    def receive(self) -> Any:
        try:
            packed = self.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        return pickle.loads(packed)


class QueueLink:
    """A link that exchanges packed messages through queues in the child's own process."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.outbox: SimpleQueue[bytes] = SimpleQueue()

    def send(self, kind: Kind, record: object) -> None:
        self.outbox.put(pack((kind, record)))

    def receive(self) -> Any:
        packed = self.inbox.get()
        return None if packed is None else pickle.loads(packed)


def pack(record: object) -> bytes:
    return pickle.dumps(record, pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a child, as text: an exception would keep its frames alive."""

    message: str
    type_name: str = "WorkerError"
    traceback: str = ""
    time: float = 0.0  # when an error was reported; 0 for crashes and hangs, to sort first

    def error(self) -> NanovllmError:
        """Return the exception to raise: of the same type if in `errors.py`, else a WorkerError."""
        kind: type[NanovllmError] | None = getattr(errors, self.type_name, None)
        if kind is None:
            return WorkerError(f"{self.message}\n{self.traceback}")
        error = kind(self.message)
        error.__cause__ = WorkerError(self.traceback) if self.traceback else None
        return error


class StepTimer:
    """Measures the current steps, at most one per thread; heartbeats report the longest."""

    def __init__(self) -> None:
        self._starts: dict[int, float] = {}  # keyed by thread id

    def __enter__(self) -> None:
        self._starts[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        del self._starts[threading.get_ident()]

    def seconds(self) -> float:
        """Return the seconds since the oldest running step started; 0 if none is running."""
        now = time.monotonic()
        return now - min([now, *self._starts.values()])


Serve = Callable[[Link, StepTimer], None]


def run_child(fd: int, parent_pid: int, log_level: int, serve: Serve) -> None:
    """Run `serve` with a connection to the parent, then exit the process."""
    os.set_inheritable(fd, False)  # an inherited copy would keep the socket open after exit
    channel = Channel(Connection(fd))
    timer = StepTimer()
    args = channel, parent_pid, timer
    threading.Thread(target=_send_heartbeats, args=args, daemon=True).start()
    forward_logs(channel, log_level)
    with reporting(channel):
        serve(channel, timer)
    os._exit(0)


def _send_heartbeats(channel: Channel, parent_pid: int, timer: StepTimer) -> None:
    """Send a heartbeat every second; exit when the parent closes its end or dies."""
    poll = select.poll()
    poll.register(channel.connection.fileno(), 0)  # report only a hang-up
    # A fork of the parent may keep the parent's end open, so check the parent's pid as well.
    with suppress(OSError):
        while os.getppid() == parent_pid and not poll.poll(1000):
            channel.send(Kind.HEARTBEAT, timer.seconds())
    os._exit(1)


@contextmanager
def reporting(link: Link) -> Iterator[None]:
    """Report an error to the parent and exit, so that no other process waits for this one."""
    try:
        yield
    except BaseException as error:
        try:
            report(link, error)
        finally:  # exit even if the report fails
            os._exit(1)


def report(link: Link, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    # The monotonic clock is shared by all processes of a machine.
    link.send(Kind.ERROR, Failure(str(error), type(error).__name__, text, time.monotonic()))


def forward_logs(link: Link, level: int) -> None:
    """Send log records to the parent, which handles them."""
    logger = logging.getLogger("nanovllm")
    logger.setLevel(level)
    logger.addHandler(LinkHandler(link))  # type: ignore[arg-type]


class LinkHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.send(Kind.LOG, record)  # type: ignore[attr-defined]
