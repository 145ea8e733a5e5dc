"""A Chrome trace of snapshots: the host's parts of steps, the device's, requests."""

from __future__ import annotations

from collections.abc import Iterator

from nanovllm.engine.request import SequenceEnd
from nanovllm.server.answer import Event
from nanovllm.serving.core_records import EngineState, StepState

HOST, DEVICE, REQUESTS = 1, 2, 3
NAMES = {HOST: "host", DEVICE: "device", REQUESTS: "requests"}


class Trace:
    """Collects snapshots; `events` are in the format of ui.perfetto.dev and chrome://tracing."""

    def __init__(self, engine: int = 0) -> None:
        self.engine = engine
        self._end = 0
        self._steps: list[StepState] = []
        self._ended: list[SequenceEnd] = []
        self._running: dict[int, int] = {}  # when the unfinished ones were first seen to run

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
        """Yield all that was seen, with the times of the engine's clock."""
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

    def _step_events(self, step: StepState) -> Iterator[Event]:
        begin = step.begin
        for name in ("schedule", "submit", "wait", "commit"):
            duration = getattr(step, name)
            yield self._span(HOST, 1, name, begin, duration)
            begin += duration
        counts = {
            "prompt tokens": step.num_prefill_tokens,
            "answer tokens": step.num_decode_tokens,
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

    def _span(self, part: int, tid: int, name: str, begin: int, duration: int) -> Event:
        head = {"ph": "X", "pid": self._pid(part), "tid": tid, "name": name}
        return {**head, "ts": begin, "dur": duration}

    def _pid(self, part: int) -> int:
        return part + len(NAMES) * self.engine


def _step_name(step: StepState) -> str:
    kinds = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens}
    return " + ".join(name for name, count in kinds.items() if count)
