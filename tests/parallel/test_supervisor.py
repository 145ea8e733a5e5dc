"""The supervisor of child processes: the messages it passes on, and the failures it detects."""

from __future__ import annotations

import logging
import math
import pickle
import threading
from collections.abc import Iterator
from queue import Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.errors import EngineError, WorkerError
from nanovllm.parallel import supervisor
from nanovllm.parallel.child import Failure, Kind, Message
from nanovllm.parallel.supervisor import Supervisor

POLL, TIMEOUT, STEP_TIMEOUT = 0.0625, 0.5, 300.0  # seconds; the first two add up without rounding
NUM_POLLS = int(TIMEOUT / POLL)  # polls without a message until the heartbeat timeout


class FakeChildren:
    """Fake children: each call of `receive` takes one entry of a script, on a fake clock."""

    names = ("worker 0", "worker 1")
    heartbeat_timeout, grace_seconds = TIMEOUT, 0.0

    def __init__(self) -> None:
        self.now = 0.0
        self.script: Queue[tuple[float, list[tuple[int, Message | Failure]]]] = Queue()
        self.sent: list[bytes] = []
        self.num_stops = 0
        self._is_stopped = threading.Event()

    def send(self, packed: bytes) -> None:
        self.sent.append(packed)

    def receive(self, seconds: float) -> list[tuple[int, Message | Failure]]:
        if self.script.unfinished_tasks > self.script.qsize():
            self.script.task_done()  # the previous entry was handled
        while self.script.empty():
            if self._is_stopped.wait(0.001):
                return []
        waited, events = self.script.get()
        self.now += waited
        return events

    def stop(self) -> None:
        self.num_stops += 1
        self._is_stopped.set()

    def close(self) -> None:
        pass

    def add(self, *events: tuple[int, Message | Failure], seconds: float = 0.0) -> None:
        self.script.put((seconds, [*events]))

    def stay_silent(self, num_polls: int, *others: int) -> None:
        """Let time pass in which only some children send heartbeats."""
        for _ in range(num_polls):
            self.add(*((number, heartbeat()) for number in others), seconds=POLL)


def heartbeat(step_seconds: float = 0.0) -> Message:
    return Kind.HEARTBEAT, step_seconds


def error_of(type_name: str, message: str, seconds: float = 1.0) -> Message:
    return Kind.ERROR, Failure(message, type_name, "Traceback", seconds)


class Running:
    def __init__(self) -> None:
        self.children = FakeChildren()
        self.replies: list[tuple[int, str]] = []
        self.failures: SimpleQueue[Failure] = SimpleQueue()
        self.supervisor = Supervisor(
            self.children,
            lambda *reply: self.replies.append(reply),
            self.failures.put,
            STEP_TIMEOUT,
        )
        self.supervisor.is_armed = True

    def wait(self) -> None:
        """Wait until all entries are handled."""
        self.children.script.join()

    def failure(self) -> str:
        return self.failures.get(timeout=30).message


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", POLL)
    running: Any = None
    clock = SimpleNamespace(monotonic=lambda: running.children.now if running else 0.0)
    monkeypatch.setattr(supervisor, "time", clock)
    running = Running()
    yield running
    running.supervisor.close()


def test_messages_are_handed_on(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("nanovllm.x", logging.WARNING, "x.py", 1, "half", None, None)
    running.children.add(
        (1, (Kind.REPLY, "one")),
        (0, (Kind.LOG, record)),
    )
    running.supervisor.send("task")
    running.wait()
    assert running.replies == [(1, "one")]
    assert [record.getMessage() for record in caplog.records] == ["half"]
    assert [pickle.loads(each) for each in running.children.sent] == ["task"]
    assert running.failures.empty()


@pytest.mark.parametrize(
    ("type_name", "message", "told"),
    [
        ("AssertionError", "", "worker 1 failed: AssertionError"),
        ("KeyError", "'x'\nmore", "worker 1 failed: KeyError: 'x'"),
        ("EngineError", "no room", "no room"),
        ("EngineError", "", "EngineError"),
    ],
)
def test_an_error_is_told_with_its_reason(
    running: Running, type_name: str, message: str, told: str
) -> None:
    """The reason is in the first line, which is all that clients of a server see."""
    running.children.add((1, error_of(type_name, message)))
    assert running.failure() == told


def test_a_failure_is_kept_and_told_once(running: Running) -> None:
    running.children.add((0, Failure("worker 0 died")))
    assert running.failure() == "worker 0 died"
    for _ in range(2):
        with pytest.raises(WorkerError, match="worker 0 died"):
            running.supervisor.send(b"task")
    running.supervisor.close()
    running.supervisor.close()
    assert running.failures.empty()
    assert running.children.num_stops == 1


def test_a_death_comes_before_the_errors_it_causes(running: Running) -> None:
    running.children.grace_seconds = math.inf
    running.children.add((0, error_of("RuntimeError", "the connection is closed")))
    running.children.add((1, Failure("worker 1 died")))
    assert running.failure() == "worker 1 died\nAnother worker's error:\nTraceback"


def test_the_earliest_of_several_errors_is_told(running: Running) -> None:
    later, earlier = error_of("KeyError", "late", 2.0), error_of("KeyError", "early", 1.0)
    running.children.add((0, later), (1, earlier))
    assert running.failure() == "worker 1 failed: KeyError: early"


def test_closing_is_a_failure_like_any_other(running: Running) -> None:
    running.supervisor.close()
    with pytest.raises(EngineError, match="is closed"):
        running.supervisor.send(b"task")


def test_silence_is_a_failure(running: Running) -> None:
    running.children.stay_silent(NUM_POLLS, 0)
    running.wait()
    assert running.failures.empty()
    running.children.stay_silent(1, 0)
    assert running.failure() == "worker 1 sent no heartbeat for 0.5 s"


def test_children_may_be_silent_while_they_load(running: Running) -> None:
    running.supervisor.is_armed = False
    running.children.stay_silent(3 * NUM_POLLS)
    running.wait()
    assert running.failures.empty()


def test_a_step_may_take_its_time_and_no_longer(running: Running) -> None:
    running.children.add((0, heartbeat(STEP_TIMEOUT)))
    running.wait()
    assert running.failures.empty()
    running.children.add((0, heartbeat(400.0)))
    assert running.failure() == "worker 0 did not return from a step for 400 s"


def test_a_process_that_could_not_listen_blames_nobody(running: Running) -> None:
    """The process was suspended repeatedly while heartbeats arrived; no child counts as silent."""
    for _ in range(20):
        running.children.add(seconds=3 * TIMEOUT)
        running.children.add((0, heartbeat()), (1, heartbeat()), seconds=POLL)
    running.wait()
    assert running.failures.empty()


def test_an_error_in_a_callback_ends_the_children(running: Running) -> None:
    running.replies = None  # type: ignore[assignment]
    running.children.add((0, (Kind.REPLY, "one")))
    assert "cannot read messages from the engine: AttributeError" in running.failure()
