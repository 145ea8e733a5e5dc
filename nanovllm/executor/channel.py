"""Whole messages of any size between the engine and one of its children."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol


class Kind(IntEnum):
    TASK = 0  # to a child: what to build, then plans or commands
    REPLY = 1  # to the engine: the answer to a task, or an update
    LOG = 2
    ERROR = 3
    HEARTBEAT = 4  # to the engine, every second: how long the current step has been running


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    body: bytearray


def pack(kind: Kind, body: bytes | memoryview) -> bytes:
    return b"".join([bytes([kind]), body])


def unpack(packed: bytes) -> Message:
    return Message(Kind(packed[0]), bytearray(memoryview(packed)[1:]))


class Link(Protocol):
    """A child's end of what carries messages."""

    def send(self, packed: bytes) -> None:
        """Hand over a message; any thread may."""

    def receive(self) -> Message | None:
        """Wait for a message; None when there will be no more."""


class Channel:
    """One end of a socket. Any thread may send, one receives; the other end's death ends both."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, packed: bytes) -> None:
        """Wait until the message is on its way; raises OSError when nobody is there."""
        with self._sending:
            self.connection.send_bytes(packed)

    def receive(self) -> Message | None:
        try:
            return unpack(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None


class QueueLink:
    """A child's end where messages go through queues of its own process."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()
        self.outbox: SimpleQueue[bytes] = SimpleQueue()

    def send(self, packed: bytes) -> None:
        self.outbox.put(packed)

    def receive(self) -> Message | None:
        return self.inbox.get()
