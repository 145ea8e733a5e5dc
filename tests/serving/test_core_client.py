"""What a core is sent together, and when it is taken for hung: not before it was listened to."""

from __future__ import annotations

import json
import pickle
import select
import socket
import struct
from array import array
from collections.abc import Iterator
from queue import Empty, Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.request import Request
from nanovllm.engine.step import ExecutorInfo
from nanovllm.errors import NanovllmError
from nanovllm.executor import child_process
from nanovllm.executor.channel import Channel, Kind, pack
from nanovllm.executor.child_process import ChildProcess
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving import core_client
from nanovllm.serving.core_client import CoreClient
from nanovllm.serving.core_records import Add, CoreReady, Finish, StartCore
from tests.executor.leftovers import wait_until

LOOK, LIMIT = 0.0625, 0.5  # seconds, which add up without rounding


class FakeProcess:
    pid = 1

    def send_signal(self, number: int) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return 0


class Looks:
    """What each look at the socket finds, and how long it took by the client's clock."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._now = 0.0
        self._looks: Queue[tuple[float, bool]] = Queue()
        self._is_taken = False

    def add(self, seconds: float, *, is_ready: bool = False) -> None:
        self._looks.put((seconds, is_ready))

    def wait(self) -> None:
        """Return when the client has dealt with all that was added."""
        wait_until(lambda: not self._looks.unfinished_tasks, 60)

    def monotonic(self) -> float:
        return self._now

    def select(self, readers: list[Any], *others: Any) -> tuple[list[Any], list[Any], list[Any]]:
        if readers != [self._channel]:  # a client of another test's engine
            return select.select(readers, *others)
        if self._is_taken:  # and dealt with, as the next look is asked for
            self._looks.task_done()
            self._is_taken = False
        try:
            seconds, is_ready = self._looks.get(timeout=0.01)
        except Empty:  # the client may have to end
            return [], [], []
        self._now += seconds
        self._is_taken = True
        return (readers if is_ready else []), [], []


class Core:
    """The other end of a client's socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        child = ChildProcess("the core", FakeProcess(), channel)  # type: ignore[arg-type]
        monkeypatch.setattr(core_client, "start_child", lambda *_: child)
        monkeypatch.setattr(core_client, "WAIT_SECONDS", LOOK)
        monkeypatch.setattr(child_process, "HEARTBEAT_TIMEOUT", LIMIT)
        self.looks = Looks(channel)
        monkeypatch.setattr(core_client, "time", SimpleNamespace(monotonic=self.looks.monotonic))
        monkeypatch.setattr(core_client, "select", SimpleNamespace(select=self.looks.select))
        self.channel = Channel(theirs)
        self.failures: SimpleQueue[NanovllmError] = SimpleQueue()
        self.client = CoreClient(EngineConfig("x"), lambda _: None, self.failures.put)

    def receive(self) -> Any:
        message = self.channel.receive()
        assert message is not None
        return pickle.loads(message.body)

    def send(self, kind: Kind, body: bytes) -> None:
        self.channel.send(pack(kind, [body]))
        self.looks.add(0.0, is_ready=True)

    def get_ready(self) -> None:
        self.send(Kind.REPLY, pickle.dumps(CoreReady(ExecutorInfo(1, 0, "cpu", "float32"), 9)))

    def send_heartbeat(self, step_seconds: float = 0.0) -> None:
        self.send(Kind.HEARTBEAT, struct.pack("<d", step_seconds))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    core = Core(monkeypatch)
    yield core
    core.client.close()
    core.channel.close()


def request(seq_id: int, num_tokens: int) -> Request:
    return Request(seq_id, array("i", [1] * num_tokens), SamplingParams())


def test_requests_go_together_and_before_what_ends_them(core: Core) -> None:
    assert isinstance(core.receive(), StartCore)
    client, num_enough = core.client, 2 * EngineConfig("x").max_num_batched_tokens
    client.add([request(0, 9)])
    client.add([request(1, 9), request(2, 9)])
    client.flush()
    client.flush()  # nothing is left
    client.add([request(3, num_enough - 1)])
    client.add([request(4, 1)])  # enough: it does not wait for a flush
    client.add([request(5, 1)])
    client.finish(Finish([5], "abort"))
    received = [core.receive() for _ in range(4)]
    added = [[each.seq_id for each in add.requests] for add in received[:3] if isinstance(add, Add)]
    assert added == [[0, 1, 2], [3, 4], [5]]
    assert received[3] == Finish([5], "abort")


@pytest.mark.parametrize(
    ("type_name", "message", "told"),
    [
        ("AssertionError", "", "the core failed: AssertionError"),
        ("KeyError", "'x'\nmore", "the core failed: KeyError: 'x'"),
        ("EngineError", "no room", "no room"),
        ("EngineError", "", "EngineError"),
    ],
)
def test_an_error_is_told_with_its_reason(
    core: Core, type_name: str, message: str, told: str
) -> None:
    """In the first line, which is all that clients of a server see."""
    report = {"type": type_name, "message": message, "traceback": "Traceback ...", "time": 0.0}
    core.channel.send(pack(Kind.ERROR, [json.dumps(report).encode()]))
    core.looks.add(0.0, is_ready=True)
    assert str(core.failures.get(timeout=30)).splitlines()[0] == told


def test_silence_is_a_failure(core: Core) -> None:
    core.get_ready()
    for _ in range(int(LIMIT / LOOK)):
        core.looks.add(LOOK)
    core.looks.wait()
    assert core.failures.empty()
    core.looks.add(LOOK)
    assert "sent no heartbeat for 0.5 s" in str(core.failures.get(timeout=30))


def test_a_core_may_be_silent_while_it_loads(core: Core) -> None:
    core.send_heartbeat()
    for _ in range(3 * int(LIMIT / LOOK)):
        core.looks.add(LOOK)
    core.looks.wait()
    assert core.failures.empty()


def test_a_step_may_take_its_time_and_no_longer(core: Core) -> None:
    core.get_ready()
    core.send_heartbeat(EngineConfig("x").step_timeout)
    core.looks.wait()
    assert core.failures.empty()
    core.send_heartbeat(400.0)
    assert "did not return from a step for 400 s" in str(core.failures.get(timeout=30))


def test_a_front_that_could_not_listen_blames_nobody(core: Core) -> None:
    """It was held up between its wait and the heartbeat that came meanwhile, once or every time."""
    core.get_ready()
    for _ in range(20):
        core.looks.add(3 * LIMIT)
        core.looks.add(LOOK)
        core.send_heartbeat()
    core.looks.wait()
    assert core.failures.empty()
