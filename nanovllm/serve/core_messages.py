"""Messages between AsyncLLM and an engine core in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.request import EngineCoreOutputs, FinishReason, Request
from nanovllm.engine.timing import SequenceEnd, StepTiming

# "preempted": waiting, but has run before. "postponed": waiting for its grammar or bitmask.
SequenceStatus = Literal["running", "waiting", "preempted", "postponed"]
ControlAction = Literal["pause", "step", "resume"]


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Add requests; all samples of a prompt are in the same message."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class FinishSequences:
    """Finish sequences early; the next update reports them as finished."""

    seq_ids: list[int]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class SendSnapshots:
    """Start or stop sending snapshots of the engine's state."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class Control:
    """Pause between two steps, run one step and pause again, or resume."""

    action: ControlAction


@dataclass(frozen=True, slots=True)
class CoreReady:
    info: ExecutorInfo
    max_len: int  # maximum sequence length in tokens


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Statistics of an engine core after a step; counters are zero when the core starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # including blocks held only by the prefix cache
    num_preemptions: int = 0
    num_cache_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_cache_hits: int = 0  # prompt tokens found in the prefix cache
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_drafts: int = 0  # rows with draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # accepted draft tokens


def total(stats: list[CoreStats]) -> CoreStats:
    """Sum each field over several cores."""
    return CoreStats(*map(sum, zip(*map(astuple, stats), strict=True)))


class SequenceState(NamedTuple):
    seq_id: int
    status: SequenceStatus
    num_prompt_tokens: int
    max_len: int  # maximum length in tokens, prompt included
    num_cached: int  # prompt tokens found in the prefix cache
    num_computed: int
    num_tokens: int  # prompt and output tokens known to the host
    arrival: int  # microseconds
    block_ids: list[int]


class Change(NamedTuple):
    """A difference between two snapshots; the page shows it in step mode."""

    kind: str  # such as "allocated"
    function: str  # function that makes such changes, as "file::function"
    seq_id: int | None
    block_ids: list[int]
    note: str = ""
    token_ids: Sequence[int] = ()  # sampled tokens


@dataclass(frozen=True, slots=True)
class PausedState:
    """Additional contents of a snapshot while the engine is paused."""

    changes: list[Change]  # changes since the previous snapshot
    block_tokens: dict[int, list[int]]  # token ids of all blocks in use or in the prefix cache
    prompts: dict[int, list[int]]  # first token ids of each running or waiting sequence


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot of an engine. Times are microseconds on the clock of `time.perf_counter`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    sequences: list[SequenceState]  # all running sequences, and those in `queue`
    queue: list[int]  # seq_ids of the first waiting sequences; `stats` counts all of them
    cached: bytes  # one byte per block: 1 if it is in the prefix cache, even if a sequence holds it
    steps: list[StepTiming]  # steps since the last snapshot
    ended: list[SequenceEnd]  # sequences that ended since the last snapshot
    stats: CoreStats
    time: int
    paused: PausedState | None = None  # set while the engine is paused
    # Ids of blocks with a snapshot of the recurrent state; None without recurrent layers.
    snapshots: list[int] | None = None


@dataclass(frozen=True, slots=True)
class CoreUpdate:
    """Update sent after every step; while idle, every second, or every 0.1 s with a subscriber."""

    step: EngineCoreOutputs
    stats: CoreStats
    state: EngineState | None = None  # set only while a client is subscribed
