"""When a core is taken for hung: after it was listened to in vain, and not before."""

from __future__ import annotations

import pickle
import select
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.errors import NanovllmError
from nanovllm.executor.channel import Channel, Kind, pack
from nanovllm.executor.child_process import ChildProcess
from nanovllm.serving import core_client
from nanovllm.serving.core_client import CoreClient
from nanovllm.serving.core_records import CoreUpdate

LOOK, LIMIT = 0.05, 0.4  # seconds


class FakeProcess:
    pid = 1

    def send_signal(self, number: int) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return 0


class Core:
    """The other end of a client's socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = socket.socketpair()
        child = ChildProcess("the core", FakeProcess(), Channel(ours))  # type: ignore[arg-type]
        monkeypatch.setattr(core_client, "start_child", lambda *_: child)
        monkeypatch.setattr(core_client, "LOOK_SECONDS", LOOK)
        self.channel = Channel(theirs)
        self.failures: SimpleQueue[NanovllmError] = SimpleQueue()
        self.client = CoreClient(EngineConfig("x"), lambda _: None, self.failures.put)

    def give_sign(self) -> None:
        sign = pickle.dumps(CoreUpdate(None, None, LIMIT))
        self.channel.send(pack(Kind.REPLY, [sign]))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    core = Core(monkeypatch)
    yield core
    core.client.close()
    core.channel.close()


def test_silence_is_a_failure(core: Core) -> None:
    core.give_sign()
    assert "no sign of life for 0.4 s" in str(core.failures.get(timeout=30))


def test_a_front_that_could_not_listen_blames_nobody(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, held = select.select, threading.Event()

    def held_up(*arguments: Any) -> Any:
        result = look(*arguments)
        if not result[0] and not held.is_set():  # just before the sign that comes now
            held.set()
            time.sleep(3 * LIMIT)
        return result

    core.give_sign()
    time.sleep(2 * LOOK)  # until it was heard
    monkeypatch.setattr(core_client.select, "select", held_up)
    assert held.wait(30)
    for _ in range(20):
        core.give_sign()
        time.sleep(LIMIT / 4)
    assert core.failures.empty()
