"""Records that cross between AsyncLLM and an engine core in a child process, beside requests."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

from nanovllm.engine.request import (
    EngineCoreOutputs,
    FinishReason,
    Request,
    SequenceEnd,
    StepTiming,
)
from nanovllm.engine.step import ExecutorInfo

# A waiting sequence that ran before is preempted; a postponed one waits for a mask of its grammar.
SequenceStatus = Literal["running", "waiting", "preempted", "postponed"]


@dataclass(frozen=True, slots=True)
class Add:
    """Requests that came together; the samples of a prompt do."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Finish:
    """End some sequences; an update will have their finished."""

    seq_ids: list[int]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Watch:
    """Send snapshots of the engine's state from now on, or no more."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class CoreReady:
    info: ExecutorInfo
    max_len: int  # where sequences end


@dataclass(frozen=True, slots=True)
class CoreStats:
    """The state of a scheduler after a step; what is counted, since the core began."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # those that only the prefix cache holds are free
    num_preemptions: int = 0
    num_cache_queries: int = 0  # prompt tokens that were looked up
    num_cache_hits: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


def total(stats: list[CoreStats]) -> CoreStats:
    """Sum each count over several cores."""
    return CoreStats(*map(sum, zip(*map(astuple, stats), strict=True)))


class SequenceState(NamedTuple):
    seq_id: int
    status: SequenceStatus
    num_prompt_tokens: int
    max_len: int  # where it ends, prompt included
    num_cached: int  # prompt tokens found in the prefix cache
    num_computed: int
    num_tokens: int  # prompt and answer, as far as the host knows them
    arrival: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot of an engine. Times are microseconds of the clock of `time.perf_counter`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    sequences: list[SequenceState]  # all that run, and those in `queue`
    queue: list[int]  # the first ones that wait; `stats` counts all
    cached: bytes  # for each block 1 if it holds a prefix that others may share, in use or not
    steps: list[StepTiming]  # since the last snapshot
    ended: list[SequenceEnd]  # since the last snapshot
    stats: CoreStats
    time: int


@dataclass(frozen=True, slots=True)
class CoreUpdate:
    """The result of a step, or an empty one every second while the core is idle."""

    step: EngineCoreOutputs
    stats: CoreStats
    state: EngineState | None = None  # while a client is subscribed
