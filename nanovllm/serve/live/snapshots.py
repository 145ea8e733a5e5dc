"""Snapshots of an engine core, taken between its steps."""

from __future__ import annotations

from itertools import islice
from typing import Any, TypeVar

from nanovllm.engine.core import EngineCore
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.timing import SequenceEnd, StepLog, StepTiming
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.live.engine_state import EngineState, HeldBlocks, SequenceState, SequenceStatus

MAX_QUEUE = 64  # maximum number of waiting, and of postponed, sequences in a snapshot

T = TypeVar("T", StepTiming, SequenceEnd)


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
        [HeldBlocks(table.first, table.held_block_ids) for table in seq.tables],
    )


def _in_microseconds(timing: T) -> T:
    values = timing._asdict().items()
    times: dict[str, Any] = {
        name: _microseconds(value) for name, value in values if isinstance(value, float)
    }
    return timing._replace(**times)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
