"""Snapshots of an engine core between its steps, while a client is subscribed."""

from __future__ import annotations

import time
from itertools import islice

from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import StepTiming, microseconds
from nanovllm.engine.sequence import Sequence
from nanovllm.serving.core_records import CoreStats, EngineState, SequenceState, SequenceStatus

SECONDS_BETWEEN = 0.1
MAX_QUEUE = 64  # sequences of the queue in a snapshot


class Observer:
    """Decides when a snapshot is due; the core has one only while a client is subscribed."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._stats: CoreStats | None = None  # of the last snapshot
        self._earliest = 0.0  # when the next one may be taken
        core.timings.clear()
        core.ended.clear()

    def restart(self) -> None:
        """Take the next snapshot even if nothing changes: another client has subscribed."""
        self._stats = None

    def snapshot(self, stats: CoreStats) -> EngineState | None:
        """Return the state, unless it is unchanged or the last snapshot was just taken."""
        core, now = self._core, time.perf_counter()
        is_changed = stats != self._stats or core.timings or core.ended
        if not is_changed or now < self._earliest:
            return None
        self._stats, self._earliest = stats, now + SECONDS_BETWEEN
        return take_snapshot(core, stats, now)


def take_snapshot(core: EngineCore, stats: CoreStats, now: float) -> EngineState:
    """Return the state of a core, and move its recorded steps and ended sequences into it."""
    scheduler = core.scheduler
    waiting = list(islice(scheduler.waiting, MAX_QUEUE))
    postponed = list(islice(scheduler.postponed.values(), MAX_QUEUE))
    state = EngineState(
        scheduler.blocks.num_blocks,
        scheduler.blocks.block_size,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        [
            *(_sequence(seq, "running") for seq in scheduler.running.values()),
            *(_sequence(seq, "preempted" if seq.start_time else "waiting") for seq in waiting),
            *(_sequence(seq, "postponed") for seq in postponed),
        ],
        [seq.seq_id for seq in (*waiting, *postponed)],
        bytes(scheduler.blocks.is_cached),
        [_in_microseconds(timing) for timing in core.timings],
        list(core.ended),
        stats,
        microseconds(now),
    )
    core.timings.clear()
    core.ended.clear()
    return state


def _sequence(seq: Sequence, status: SequenceStatus) -> SequenceState:
    return SequenceState(
        seq.seq_id,
        status,
        seq.num_prompt_tokens,
        seq.max_len,
        seq.num_cached,
        seq.num_computed,
        len(seq.token_ids),
        microseconds(seq.request.arrival_time),
        list(seq.block_ids),
    )


def _in_microseconds(timing: StepTiming) -> StepTiming:
    times = map(microseconds, timing[: -len(StepTiming._field_defaults)])
    return timing._replace(**dict(zip(StepTiming._fields, times, strict=False)))
