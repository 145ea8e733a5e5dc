"""Whole messages of any size over a socket between the engine and one worker."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue
from typing import Protocol

from nanovllm.executor.codec import Section

_HEADER = struct.Struct("<BQ")  # kind, bytes that follow
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)  # an error, even where SIGPIPE would end the program


class Kind(IntEnum):
    TASK = 0  # to a worker: what to build, then plans
    REPLY = 1  # to the engine: the answer to a task
    LOG = 2
    ERROR = 3
    HEARTBEAT = 4  # to the engine, every second: how long the current step has been running


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    body: bytearray


def pack(kind: Kind, sections: Iterable[Section]) -> bytes:
    body = b"".join(sections)
    return _HEADER.pack(kind, len(body)) + body


def unpack(packed: bytes) -> Message:
    kind, _ = _HEADER.unpack_from(packed)
    return Message(Kind(kind), bytearray(packed[_HEADER.size :]))


class Link(Protocol):
    """One end of what carries messages: a socket, or a queue where Ray carries them."""

    def send(self, packed: bytes) -> None:
        """Hand over a message; any thread may."""

    def receive(self) -> Message | None:
        """Wait for a message; None when there will be no more."""


class Channel:
    """One end. Any thread may send, one receives; the other end's death ends both."""

    def __init__(self, connection: socket.socket, timeout: float = 0.0) -> None:
        """Treat the other end as gone when no byte comes for `timeout` seconds within a message."""
        self._socket = connection
        self._sending = threading.Lock()
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))  # zero: none
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, packed: bytes) -> None:
        """Wait until the message is on its way; raises OSError when nobody is there."""
        with self._sending:
            self._socket.sendall(packed, _FLAGS)

    def receive(self) -> Message | None:
        """Wait for a message; None when the other end is gone."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, num_bytes = _HEADER.unpack(header)
        body = self._read(num_bytes)
        return None if body is None else Message(Kind(kind), body)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray(num_bytes)
        left = memoryview(data)
        while left:
            try:
                num_read = self._socket.recv_into(left)
            except (ConnectionError, BlockingIOError):  # it died with bytes unread, or hangs
                return None
            if num_read == 0:
                return None
            left = left[num_read:]
        return data


class QueueLink:
    """A child's end where messages go through queues of its own process."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Message | None] = SimpleQueue()
        self.outbox: SimpleQueue[bytes] = SimpleQueue()

    def send(self, packed: bytes) -> None:
        self.outbox.put(packed)

    def receive(self) -> Message | None:
        return self.inbox.get()
