"""A child process of the engine: it exchanges records with its parent, and ends with it.

Importing this file must stay quick: until it is done, nobody notices that the parent died.
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
    """Kinds of messages to the engine; all messages to a child are tasks."""

    REPLY = 0  # the answer to a task, or an update
    LOG = 1
    ERROR = 2
    HEARTBEAT = 3  # every second: how many seconds the current step has been running


Message = tuple[Kind, Any]


class Link(Protocol):
    """A child's end of what carries messages."""

    def send(self, kind: Kind, record: object) -> None:
        """Send a message to the engine; any thread may."""

    def receive(self) -> Any:
        """Wait for a task; None when there will be no more."""


class Channel:
    """One end of a socket. Any thread may send, one receives; the other end's death ends both."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, kind: Kind, record: object) -> None:
        self.send_packed(pack((kind, record)))

    def send_packed(self, packed: bytes) -> None:
        """Wait until the message is on its way; raises OSError when nobody is there."""
        with self._sending:
            self.connection.send_bytes(packed)

    def receive(self) -> Any:
        try:
            packed = self.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        return pickle.loads(packed)


class QueueLink:
    """A child's end where packed messages go through queues of its own process."""

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
    """Why children can do no more, as text: an exception would keep the frames it passed alive."""

    message: str
    type_name: str = "WorkerError"
    traceback: str = ""
    time: float = 0.0  # of an error: a death comes before the errors that it causes

    def error(self) -> NanovllmError:
        """Make what a caller gets: an error of ours as it was, any other with its traceback."""
        kind: type[NanovllmError] | None = getattr(errors, self.type_name, None)
        if kind is None:
            return WorkerError(f"{self.message}\n{self.traceback}")
        error = kind(self.message)
        error.__cause__ = WorkerError(self.traceback) if self.traceback else None
        return error


class StepTimer:
    """Times the steps that run, one in each thread, for the heartbeats."""

    def __init__(self) -> None:
        self._starts: dict[int, float] = {}  # by thread

    def __enter__(self) -> None:
        self._starts[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        del self._starts[threading.get_ident()]

    def seconds(self) -> float:
        """Return the seconds since the oldest step began."""
        now = time.monotonic()
        return now - min([now, *self._starts.values()])


Serve = Callable[[Link, StepTimer], None]


def run_child(fd: int, parent_pid: int, log_level: int, serve: Serve) -> None:
    """Serve the parent at the other end of a socket, and end."""
    os.set_inheritable(fd, False)  # or a child of this process could hide its death
    channel = Channel(Connection(fd))
    timer = StepTimer()
    args = channel, parent_pid, timer
    threading.Thread(target=_send_heartbeats, args=args, daemon=True).start()
    forward_logs(channel, log_level)
    with reporting(channel):
        serve(channel, timer)
    os._exit(0)


def _send_heartbeats(channel: Channel, parent_pid: int, timer: StepTimer) -> None:
    """Send a heartbeat every second; end the process when the parent closes its end or dies."""
    poll = select.poll()
    poll.register(channel.connection.fileno(), 0)  # only a hang-up
    # A process forked from the parent may keep that end open, hence the check of the parent's id.
    with suppress(OSError):
        while os.getppid() == parent_pid and not poll.poll(1000):
            channel.send(Kind.HEARTBEAT, timer.seconds())
    os._exit(1)


@contextmanager
def reporting(link: Link) -> Iterator[None]:
    """Report an error to the parent and end the process: others may wait for it in vain."""
    try:
        yield
    except BaseException as error:
        try:
            report(link, error)
        finally:  # whatever else fails, nobody may wait for it
            os._exit(1)


def report(link: Link, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    # The clock is the same for all processes of a machine.
    link.send(Kind.ERROR, Failure(str(error), type(error).__name__, text, time.monotonic()))


def forward_logs(link: Link, level: int) -> None:
    """Log where the parent does."""
    logger = logging.getLogger("nanovllm")
    logger.setLevel(level)
    logger.addHandler(LinkHandler(link))  # type: ignore[arg-type]


class LinkHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.send(Kind.LOG, record)  # type: ignore[attr-defined]
