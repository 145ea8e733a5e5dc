"""The engine's state as a stream of events, and a record of its steps that Perfetto opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import anyio

from nanovllm.errors import NanovllmError
from nanovllm.server.answer import Event
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.model import Model
from nanovllm.server.trace import Trace
from nanovllm.serving.core_records import CoreStats
from nanovllm.serving.state_records import EngineNews, EngineState

MAX_TRACE_SECONDS = 60.0


class EngineEvents:
    """A snapshot, then changes, for as long as the client reads; of any engine that answers."""

    end = b""

    def __init__(self, llm: Model, engine: int | None = None) -> None:
        num_engines = len(llm.replicas)
        if num_engines == 0:  # a cluster has none for a while
            raise ApiError("no engine is running", 503)
        if engine is None:
            living = (i for i, replica in enumerate(llm.replicas) if replica.error is None)
            engine = next(living, 0)
        if not 0 <= engine < num_engines:
            text = f"engine must be from 0 to {num_engines - 1}, got {engine}"
            raise ApiError(text, param="engine")
        self._llm = llm
        self._place = {"engine": engine, "num_engines": num_engines}

    async def events(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(self._llm.watch(self._place["engine"])) as news:
            async for each in news:
                event = as_event(each)
                yield {**event, **self._place} if isinstance(each, EngineState) else event

    def encode(self, event: Event) -> bytes:
        return b"data: " + to_json(event) + b"\n\n"

    def error(self, error: ApiError) -> list[Event]:
        return [error.openai()]


class TraceAnswer:
    """The steps and sequences of some seconds, from now on, of all engines."""

    def __init__(self, llm: Model, seconds: float) -> None:
        if not 0 < seconds <= MAX_TRACE_SECONDS:
            text = f"seconds must be more than 0 and at most {MAX_TRACE_SECONDS:g}, got {seconds:g}"
            raise ApiError(text, param="seconds")
        self._llm, self._seconds = llm, seconds

    async def events(self) -> AsyncGenerator[Event, None]:
        traces = [Trace(engine) for engine in range(len(self._llm.replicas))]
        with anyio.move_on_after(self._seconds):
            await asyncio.gather(*map(self._record, traces))
        begin = min((trace.begin for trace in traces if trace.begin), default=0)
        for trace in traces:
            for event in trace.events(begin, is_alone=len(traces) == 1):
                yield event

    async def _record(self, trace: Trace) -> None:
        """Add what an engine does; one of several may be lost before or meanwhile."""
        try:
            async with contextlib.aclosing(self._llm.watch(trace.engine)) as news:
                async for each in news:
                    trace.add(each)
        except NanovllmError:
            if self._llm.error is not None:
                raise

    def whole(self, events: list[Event]) -> Event:
        return {"displayTimeUnit": "ms", "traceEvents": events}


def as_event(news: EngineNews) -> Event:
    """Rows stay rows: lists in the order of their records' fields."""
    event: dict[str, Any] = {field.name: getattr(news, field.name) for field in fields(news)}
    stats = event["stats"]
    event["stats"] = {field.name: getattr(stats, field.name) for field in fields(CoreStats)}
    return {"kind": "state" if isinstance(news, EngineState) else "change", **event}
