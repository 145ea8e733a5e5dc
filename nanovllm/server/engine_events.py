"""The engine's state as a stream of events, and a record of its steps that Perfetto opens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import anyio

from nanovllm.server.answer import Event
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.model import Model
from nanovllm.server.trace import Trace
from nanovllm.serving.core_records import CoreStats
from nanovllm.serving.state_records import EngineNews, EngineState

MAX_TRACE_SECONDS = 60.0


class EngineEvents:
    """A snapshot, then changes, for as long as the client reads."""

    end = b""

    def __init__(self, llm: Model) -> None:
        self._llm = llm

    async def events(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(self._llm.watch()) as news:
            async for each in news:
                yield as_event(each)

    def encode(self, event: Event) -> bytes:
        return b"data: " + to_json(event) + b"\n\n"

    def error(self, error: ApiError) -> list[Event]:
        return [error.openai()]


class TraceAnswer:
    """The steps and sequences of some seconds, from now on."""

    def __init__(self, llm: Model, seconds: float) -> None:
        if not 0 < seconds <= MAX_TRACE_SECONDS:
            text = f"seconds must be more than 0 and at most {MAX_TRACE_SECONDS:g}, got {seconds:g}"
            raise ApiError(text, param="seconds")
        self._llm, self._seconds = llm, seconds

    async def events(self) -> AsyncGenerator[Event, None]:
        trace = Trace()
        with anyio.move_on_after(self._seconds):
            async with contextlib.aclosing(self._llm.watch()) as news:
                async for each in news:
                    trace.add(each)
        for event in trace.events():
            yield event

    def whole(self, events: list[Event]) -> Event:
        return {"displayTimeUnit": "ms", "traceEvents": events}


def as_event(news: EngineNews) -> Event:
    """Rows stay rows: lists in the order of their records' fields."""
    event: dict[str, Any] = {field.name: getattr(news, field.name) for field in fields(news)}
    stats = event["stats"]
    event["stats"] = {field.name: getattr(stats, field.name) for field in fields(CoreStats)}
    return {"kind": "state" if isinstance(news, EngineState) else "change", **event}
