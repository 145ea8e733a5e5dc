"""Messages to a core, and the statistics that it sends."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.request import Request
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import replica
from nanovllm.serve.core_messages import AddRequests, CoreStats, FinishSequence, total
from nanovllm.serve.replica import Replica


class FakeSupervisor:
    failure = None

    def __init__(self, *_: object) -> None:
        self.records: list[Any] = []

    def send(self, record: object) -> None:
        self.records.append(record)


class FakeProcesses:
    pids = (1,)

    def __init__(self, *_: object) -> None:
        pass


def request(seq_id: int, num_tokens: int) -> Request:
    return Request(seq_id, array("i", [1] * num_tokens), SamplingParams())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(replica, "ChildProcesses", FakeProcesses)
    monkeypatch.setattr(replica, "Supervisor", FakeSupervisor)
    return Replica(EngineConfig("x"), 0, lambda *_: None, lambda *_: None)


def test_requests_go_together_and_before_what_ends_them(client: Replica) -> None:
    config = EngineConfig("x")
    client.add([request(0, 9)])
    client.add([request(1, 9), request(2, 9)])
    client.flush()
    client.flush()  # nothing is left
    client.add([request(3, 2 * config.max_num_batched_tokens - 1)])
    client.add([request(4, 1)])  # enough tokens: sent without a flush
    client.add([request(5, 1)])
    client.finish(5, "abort")
    first, *adds, finish = client._supervisor.records  # type: ignore[attr-defined]
    assert first == config
    assert all(isinstance(each, AddRequests) for each in adds)
    assert [[each.seq_id for each in add.requests] for add in adds] == [[0, 1, 2], [3, 4], [5]]
    assert finish == FinishSequence(5, "abort")


def test_statistics_of_cores_that_are_new_or_have_failed(client: Replica) -> None:
    """A new core has not sent the number of groups yet; a failed one holds no blocks."""
    busy = CoreStats(num_running=1, num_blocks=9, num_free_blocks=4, num_held_blocks=(3, 2))
    assert total([CoreStats(), busy, busy]).num_held_blocks == (6, 4)
    client.stats = busy
    client.fail(EngineError("it died"))
    assert client.stats == CoreStats(num_blocks=9, num_free_blocks=9, num_held_blocks=(0, 0))
