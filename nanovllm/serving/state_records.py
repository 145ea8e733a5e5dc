"""What a core shows of itself: its whole state once, then what changed since, in rows of numbers.

Times are microseconds of the clock that `time.perf_counter` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanovllm.engine.request import FinishReason
from nanovllm.serving.core_records import CoreStats

# Waiting ones that ran before are preempted; postponed ones wait for a mask of their grammar.
Status = Literal["running", "waiting", "preempted", "postponed"]


class SequenceState(NamedTuple):
    seq_id: int
    status: Status
    num_prompt_tokens: int
    max_len: int  # where it ends, prompt included
    num_cached: int  # prompt tokens that it found in the cache
    num_computed: int
    num_tokens: int  # prompt and answer, as far as the host knows them
    arrival: int
    block_ids: list[int]


class SequenceEnd(NamedTuple):
    """A sequence is over; also one that nobody saw, so short was it."""

    seq_id: int
    reason: FinishReason
    num_new_tokens: int
    start: int  # of its first step; 0 when there was none
    first_token: int  # 0 when there was none
    end: int


class StepState(NamedTuple):
    """One turn of the loop: what the host did, and the step whose result came in it, if any."""

    begin: int
    schedule: int  # how long each part of the turn took
    submit: int
    wait: int
    commit: int
    device_begin: int
    device: int  # from when the step could begin until its result was there
    num_prefill_tokens: int
    num_decode_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class EngineState:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    sequences: list[SequenceState]  # all that run, and those in `queue`
    queue: list[int]  # the next ones of those that wait; `stats` counts all
    cached: list[int]  # blocks that hold a prefix others may share, in use or not
    steps: list[StepState]  # since the last change, for those who watched before
    ended: list[SequenceEnd]
    stats: CoreStats
    time: int


@dataclass(frozen=True, slots=True)
class EngineChange:
    sequences: list[SequenceState]  # new ones, and those that entered or left the batch
    progress: list[int]  # of each that went on: seq_id, num_computed and num_tokens
    grown: list[tuple[int, list[int]]]  # seq_id and the blocks that it took beside those it had
    gone: list[int]  # no longer shown
    queue: list[int] | None  # None: as it was
    cached: list[int]
    uncached: list[int]
    steps: list[StepState]
    ended: list[SequenceEnd]
    stats: CoreStats
    time: int


EngineNews = EngineState | EngineChange
