"""A failed core is restarted: waiters get an error, later requests succeed, retries are bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.errors import EngineError
from nanovllm.serve import replica
from nanovllm.serve.replica import MAX_FAILURES, SOON_SECONDS, Replica
from tests.serve.byte_model import make_byte_model
from tests.serve.running import Running, running

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


class IdleProcesses:
    """Child processes that are never started."""

    pids = (1,)

    def __init__(self, *_: object) -> None:
        pass


class IdleSupervisor:
    failure = None

    def __init__(self, *_: object) -> None:
        pass

    def send(self, packed: bytes) -> None:
        pass


@pytest.fixture
def make_replica(monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], Replica]:
    """Return a replica that became ready some seconds ago, or never."""
    monkeypatch.setattr(replica, "ChildProcesses", IdleProcesses)
    monkeypatch.setattr(replica, "Supervisor", IdleSupervisor)

    def make(lasted: float | None) -> Replica:
        made = Replica(EngineConfig("x"), 0, lambda *_: None, lambda *_: None)
        made._ready_time = None if lasted is None else time.monotonic() - lasted
        return made

    return make


@pytest.mark.parametrize("lasted", [SOON_SECONDS / 2, None], ids=["fails soon", "never ready"])
def test_cores_that_fail_soon_are_replaced_later_and_in_the_end_not_at_all(
    make_replica: Callable[[float | None], Replica], lasted: float | None
) -> None:
    delays, lost = [], make_replica(lasted)
    while (delay := lost.restart_delay()) is not None:
        delays.append(delay)
        another = make_replica(lasted)
        another.take_place_of(lost)
        lost = another
    assert delays == [0, 1, 3, 7, 15]


def test_a_core_that_lasts_is_replaced_at_once(
    make_replica: Callable[[float | None], Replica],
) -> None:
    lost = make_replica(SOON_SECONDS + 1)
    for seconds in [SOON_SECONDS + 1, SOON_SECONDS / 2] * MAX_FAILURES:
        assert lost.restart_delay() == (0 if seconds > SOON_SECONDS else 1)
        another = make_replica(None if seconds > SOON_SECONDS else SOON_SECONDS + 1)
        another.take_place_of(lost)
        lost = another


@pytest.fixture
def llm(tmp_path: Path) -> Any:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
    llm = AsyncLLM(make_byte_model(tmp_path), restart_core=True, **options)
    yield llm
    llm.close()


async def answer(llm: AsyncLLM, params: SamplingParams) -> list[int]:
    pieces = [piece async for piece in llm.generate([1, 2, 3], params)]
    assert pieces[-1].output is not None
    return pieces[-1].output.token_ids


@pytest.mark.slow
def test_another_core_answers(llm: AsyncLLM) -> None:
    """This core hangs; the next test kills one."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    wanted = asyncio.run(answer(llm, params))
    pid = llm.replicas[0].pid

    async def fail(server: Running) -> None:
        waiting = [asyncio.create_task(answer(llm, LONG)) for _ in range(4)]
        while llm.stats.num_running < 4:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        for task in waiting:
            with pytest.raises(EngineError, match="it is being restarted"):
                await asyncio.wait_for(task, 60)
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", prompt="x").status_code == 503
        assert llm.stats.num_running == 0

    with running(llm) as server:
        asyncio.run(fail(server))
        until_healthy(server.http)
        assert asyncio.run(answer(llm, params)) == wanted
        assert llm.replicas[0].pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        metric = 'engine_restarts_total{engine="0",model_name="tiny"} 1.0'
        assert metric in server.http.get("/metrics").text


def until_healthy(http: httpx.Client) -> None:
    deadline = time.monotonic() + 480
    while http.get("/health").status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_in_the_end_it_gives_up(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MAX_FAILURES", 2)
    monkeypatch.setattr(replica, "SOON_SECONDS", 600.0)
    with running(llm) as server:
        for _ in range(2):
            os.kill(pid := llm.replicas[0].pid, signal.SIGKILL)
            while llm.error is None:
                time.sleep(0.01)
            if "in a row" not in str(llm.error):
                until_healthy(server.http)
                assert llm.replicas[0].pid != pid
                assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        response = server.post("/v1/completions", prompt="x")
        assert response.status_code == 503
        assert "so it is not restarted" in response.json()["error"]["message"]
