"""The engine's state as a stream of events, and a record of its steps that Perfetto opens."""

from __future__ import annotations

import asyncio
import base64
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
from nanovllm.serving.core_records import CoreStats, EngineState

MAX_TRACE_SECONDS = 60.0


class EngineEvents:
    """Snapshots for as long as the client reads; of any engine that answers."""

    end = b""
    is_large = False

    def __init__(self, llm: Model, engine: int | None = None) -> None:
        numbers = [replica.number for replica in llm.replicas]
        if not numbers:  # a cluster has none for a while
            raise ApiError("no engine is running", 503)
        if engine is None:
            living = (replica.number for replica in llm.replicas if replica.error is None)
            engine = next(living, numbers[0])
        if engine not in numbers:
            known = ", ".join(map(str, numbers))
            raise ApiError(f"engine must be one of {known}, got {engine}", param="engine")
        self._llm, self._engine = llm, engine
        self._place = {"engine": engine, "engines": numbers}

    async def events(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(self._llm.watch(self._engine)) as states:
            async for state in states:
                yield {**as_event(state), **self._place}

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
        traces = [Trace(replica.number) for replica in self._llm.replicas]
        with anyio.move_on_after(self._seconds):
            await asyncio.gather(*map(self._record, traces))
        is_alone = len(traces) == 1
        events = [event for trace in traces for event in trace.events(is_alone)]
        # Requests may be older than the record, and Perfetto drops what comes before 0.
        begin = min((event["ts"] for event in events if "ts" in event), default=0)
        for event in events:
            yield event | {"ts": event["ts"] - begin} if "ts" in event else event

    async def _record(self, trace: Trace) -> None:
        """Add what an engine does; one of several may be lost before or meanwhile."""
        try:
            async with contextlib.aclosing(self._llm.watch(trace.engine)) as states:
                async for state in states:
                    trace.add(state)
        except NanovllmError:
            if self._llm.error is not None:
                raise

    def whole(self, events: list[Event]) -> Event:
        return {"displayTimeUnit": "ms", "traceEvents": events}


def as_event(state: EngineState) -> Event:
    """Rows stay rows: lists in the order of their records' fields."""
    event = _fields(state)
    cached = base64.b64encode(state.cached).decode()
    return {"kind": "state", **event, "cached": cached, "stats": _fields(state.stats)}


def _fields(record: EngineState | CoreStats) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
