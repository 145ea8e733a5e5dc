"""The engine's state as a stream of events, and traces of its steps for Perfetto."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import anyio

from nanovllm.engine.images import shown_ids
from nanovllm.engine.timing import SequenceEnd, StepTiming
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.http_responses import Event, EventStream
from nanovllm.serve.live.engine_state import EngineState, PausedState
from nanovllm.serve.model_interface import Model
from nanovllm.validation import require

MAX_TRACE_SECONDS = 60.0
Decode = Callable[[list[int]], Any]  # the tokenizer's `decode`
HOST, DEVICE, REQUESTS = 1, 2, 3
NAMES = {HOST: "host", DEVICE: "device", REQUESTS: "requests"}


class EngineEvents(EventStream):
    """Streams snapshots of one engine until the client disconnects."""

    def __init__(self, llm: Model, engine: int | None, allow_pause: bool) -> None:
        self._llm, self._engine = llm, choose_engine(llm, engine)
        numbers = [replica.number for replica in llm.replicas]
        self._place = {"engine": self._engine, "engines": numbers, "allow_pause": allow_pause}
        self.is_large = allow_pause  # a paused engine sends the text of all blocks

    async def events(self) -> AsyncGenerator[Event, None]:
        decode = self._llm.input_processor.get_tokenizer().decode
        placeholder_id = self._llm.input_processor.image_reader.placeholder_id
        if placeholder_id is not None:
            decode = partial(decode_shown, decode, placeholder_id)
        async with contextlib.aclosing(self._llm.watch(self._engine)) as states:
            async for state in states:
                yield {**as_event(state, decode), **self._place}


def decode_shown(decode: Decode, placeholder_id: int, token_ids: list[int]) -> Any:
    """Decode tokens of the engine, where the placeholders of images have ids of their own."""
    return decode(shown_ids(token_ids, placeholder_id))


def choose_engine(llm: Model, engine: int | None) -> int:
    """Validate an engine's number and return it; None selects a healthy one if possible."""
    numbers = [replica.number for replica in llm.replicas]
    if not numbers:  # a Ray cluster may have no engine for a while
        raise EngineError("no engine is running")
    if engine is None:
        living = (replica.number for replica in llm.replicas if replica.error is None)
        engine = next(living, numbers[0])
    require(engine in numbers, "engine", f"one of {', '.join(map(str, numbers))}", engine)
    return engine


def as_event(state: EngineState, decode: Decode) -> Event:
    """Convert a snapshot to an event; named tuples in it become JSON arrays."""
    event = _fields(state)
    cached = base64.b64encode(state.cached).decode()
    paused = None if state.paused is None else partial(_as_texts, state.paused, decode)
    return {
        "kind": "state",
        **event,
        "cached": cached,
        "stats": _fields(state.stats),
        "paused": paused,
    }


def _as_texts(paused: PausedState, decode: Decode) -> Event:
    """Return the fields of a paused engine's snapshot, with token ids decoded to text.

    This is slow, so `to_json` calls it in the thread that encodes the event.
    """

    def texts(tokens: Mapping[int, list[int]]) -> dict[int, str]:
        return {key: decode(ids) for key, ids in tokens.items()}

    changes = [
        (*change[:-1], decode(list(change.token_ids)) if change.token_ids else "")
        for change in paused.changes
    ]
    return {
        "changes": changes,
        "blocks": texts(paused.block_tokens),
        "prompts": texts(paused.prompts),
    }


def _fields(record: EngineState | CoreStats) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


async def record_trace(llm: Model, seconds: float) -> Event:
    """Record the steps and sequences of all engines for the given number of seconds."""
    expected = f"more than 0 and at most {MAX_TRACE_SECONDS:g}"
    require(0 < seconds <= MAX_TRACE_SECONDS, "seconds", expected, seconds)
    traces = [Trace(replica.number) for replica in llm.replicas]

    async def record(trace: Trace) -> None:
        """Record one engine; ignore its failure as long as another engine is alive."""
        try:
            async with contextlib.aclosing(llm.watch(trace.engine)) as states:
                async for state in states:
                    trace.add(state)
        except NanovllmError:
            if llm.error is not None:
                raise

    with anyio.move_on_after(seconds):
        await asyncio.gather(*map(record, traces))
    events = [event for trace in traces for event in trace.events(is_alone=len(traces) == 1)]
    # Count time from the earliest event, not from the start of the trace: requests may have arrived
    # earlier, and Perfetto drops negative timestamps.
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    shifted = [event | {"ts": event["ts"] - begin} if "ts" in event else event for event in events]
    return {"displayTimeUnit": "ms", "traceEvents": shifted}


class Trace:
    """Collects snapshots; `events` returns them in the Trace Event Format, which Perfetto reads."""

    def __init__(self, engine: int = 0) -> None:
        self.engine = engine
        self._end = 0
        self._steps: list[StepTiming] = []
        self._ended: list[SequenceEnd] = []
        # seq_id of an unfinished sequence -> time of the first snapshot in which it was running.
        self._running: dict[int, int] = {}

    def add(self, state: EngineState) -> None:
        for seq in state.sequences:
            if seq.status == "running":
                self._running.setdefault(seq.seq_id, state.time)
        self._end = state.time
        self._steps += state.steps
        self._ended += state.ended
        for end in state.ended:
            self._running.pop(end.seq_id, None)

    def events(self, is_alone: bool = True) -> Iterator[Event]:
        """Yield all trace events, timestamped by the engine's clock.

        `is_alone`: the trace covers only this engine, so its number is omitted from the names.
        """
        for part, name in NAMES.items():
            args = {"name": name if is_alone else f"engine {self.engine}: {name}"}
            yield {"ph": "M", "pid": self._pid(part), "name": "process_name", "args": args}
        for step in self._steps:
            yield from self._step_events(step)
        for end in self._ended:
            yield from self._ending_events(end)
        for seq_id, begin in self._running.items():
            name = f"sequence {seq_id}, unfinished"
            yield self._span(REQUESTS, seq_id, name, begin, self._end - begin)

    def _step_events(self, step: StepTiming) -> Iterator[Event]:
        begin = step.begin
        for name in ("schedule", "submit", "wait", "commit"):
            duration = getattr(step, name)
            yield self._span(HOST, 1, name, begin, duration)
            begin += duration
        counts = {
            "prompt tokens": step.num_prefill_tokens,
            "output tokens": step.num_decode_tokens,
        }
        if step.num_rows:
            event = self._span(DEVICE, 1, _step_name(step), step.device_begin, step.device)
            yield {**event, "args": {**counts, "rows": step.num_rows}}
            counter = {"ph": "C", "pid": self._pid(DEVICE), "name": "tokens", "args": counts}
            yield {**counter, "ts": step.device_begin}

    def _ending_events(self, end: SequenceEnd) -> Iterator[Event]:
        begin, start, first = end.arrival, end.start or end.end, end.first_token or end.end
        args = {"finish reason": end.reason, "tokens": end.num_new_tokens}
        whole = self._span(REQUESTS, end.seq_id, f"sequence {end.seq_id}", begin, end.end - begin)
        yield {**whole, "args": args}
        spans = {"queue": (begin, start), "prefill": (start, first), "decode": (first, end.end)}
        for name, (since, until) in spans.items():
            if until > since:
                yield self._span(REQUESTS, end.seq_id, name, since, until - since)

    def _span(self, part: int, tid: int, name: str, begin: float, duration: float) -> Event:
        head = {"ph": "X", "pid": self._pid(part), "tid": tid, "name": name}
        return {**head, "ts": begin, "dur": duration}

    def _pid(self, part: int) -> int:
        return part + len(NAMES) * self.engine


def _step_name(step: StepTiming) -> str:
    kinds = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens}
    return " + ".join(name for name, count in kinds.items() if count)
