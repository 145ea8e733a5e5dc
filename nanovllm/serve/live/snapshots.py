"""Snapshots of an engine core, taken between its steps."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, TypeVar

from nanovllm.engine.core import EngineCore
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.timing import SequenceEnd, StepLog, StepTiming
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.live.engine_state import EngineState, SequenceState, SequenceStatus
from nanovllm.serve.live.step_mode import StepMode

SNAPSHOT_SECONDS = 0.1  # minimum time between snapshots of a core that is not paused
MAX_QUEUE = 64  # maximum number of waiting, and of postponed, sequences in a snapshot

T = TypeVar("T", StepTiming, SequenceEnd)


class SnapshotThrottle:
    """Limits the rate of snapshots; exists only while a client is subscribed."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._stats: CoreStats | None = None  # statistics in the last snapshot
        self._earliest = 0.0  # earliest time of the next snapshot
        self._log = core.log = StepLog()

    def stop(self) -> None:
        self._core.log = None

    def restart(self) -> None:
        """Make a snapshot due even if nothing changed: a client that just subscribed has none."""
        self._stats = None

    def snapshot(self, stats: CoreStats, paused: StepMode | None = None) -> EngineState | None:
        """Return a snapshot; None if nothing changed or the last one is too recent.

        Every step of a paused engine gets a snapshot.
        """
        core, now = self._core, time.perf_counter()
        is_changed = stats != self._stats or self._log.timings or self._log.ended
        if not is_changed or (now < self._earliest and paused is None):
            return None
        self._stats, self._earliest = stats, now + SNAPSHOT_SECONDS
        state = take_snapshot(core, self._log, stats, now)
        return state if paused is None else paused.explain(state)


def take_snapshot(core: EngineCore, log: StepLog, stats: CoreStats, now: float) -> EngineState:
    """Return a snapshot of a core with the steps and ended sequences of its log; clear the log."""
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
        [_in_microseconds(timing) for timing in log.timings],
        [_in_microseconds(end) for end in log.ended],
        stats,
        _microseconds(now),
        snapshots=_snapshots(scheduler),
    )
    log.clear()
    return state


def _snapshots(scheduler: Scheduler) -> list[int] | None:
    """Return the blocks with a snapshot of recurrent states; None without recurrent layers."""
    # Only the feature for recurrent states has snapshots; its folder may be missing.
    found = (getattr(feature, "snapshots", None) for feature in scheduler.features)
    return next((list(snapshots) for snapshots in found if snapshots is not None), None)


def _sequence(seq: Sequence, status: SequenceStatus) -> SequenceState:
    return SequenceState(
        seq.seq_id,
        status,
        seq.num_prompt_tokens,
        seq.max_len,
        seq.num_cached,
        seq.num_computed,
        len(seq.token_ids),
        _microseconds(seq.request.arrival_time),
        list(seq.block_ids),
    )


def _in_microseconds(timing: T) -> T:
    values = timing._asdict().items()
    times: dict[str, Any] = {
        name: _microseconds(value) for name, value in values if isinstance(value, float)
    }
    return timing._replace(**times)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
