"""The state of the engines in the ingress of a Ray Serve application."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.errors import EngineError
from nanovllm.serve.core_messages import CoreStats
from tests.serve.byte_model import make_byte_model

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.slow, needs_ray]


class FakeEngines:
    """A handle whose engines return given results; an exception applies to all of them."""

    def __init__(self) -> None:
        self.answer: list[Any] | Exception = []

    def broadcast(self, method: str) -> FakeEngines:
        assert method == "counts"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_engines_are_known_by_number_while_they_work(tmp_path: Path) -> None:
    from ray.serve.exceptions import RayServeException

    from nanovllm.assembly import resolve_model
    from nanovllm.ray.remote_llm import EngineCounts, RemoteLLM

    engines = FakeEngines()
    found = resolve_model(EngineConfig(str(make_byte_model(tmp_path)), device="cpu"))
    llm = RemoteLLM(engines, found, 1024)

    def look(answer: list[Any] | Exception) -> list[int]:
        engines.answer = answer
        asyncio.run(llm.refresh())
        return [engine.number for engine in llm.replicas]

    busy, idle = CoreStats(num_running=2, num_blocks=8), CoreStats(num_blocks=8)
    assert look([EngineCounts("a", busy), EngineCounts("b", idle)]) == [0, 1]
    assert [engine.stats for engine in llm.replicas] == [busy, idle]
    assert look([EngineError("it hangs"), EngineCounts("b", idle)]) == [1]
    assert look([EngineCounts("c", idle), EngineCounts("b", busy)]) == [1, 2]
    assert look(TimeoutError()) == [1, 2]
    assert llm.error is None
    assert look(RayServeException("there is none")) == [1, 2]  # the previous state
    assert "no engine is running" in str(llm.error)
    assert all(engine.error is not None for engine in llm.replicas)
    assert look([EngineCounts("d", idle)]) == [3]
    assert llm.error is None
