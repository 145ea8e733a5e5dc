"""The records of a snapshot, which the core sends to its subscribers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanovllm.engine.timing import SequenceEnd, StepTiming
from nanovllm.serve.core_messages import CoreStats

# "preempted": waiting, but has run before. "postponed": a feature is not ready.
SequenceStatus = Literal["running", "waiting", "preempted", "postponed"]


class HeldBlocks(NamedTuple):
    """The blocks that a sequence holds in one group of layers; a window has freed those before."""

    first: int  # index in the block table
    block_ids: list[int]


class SequenceState(NamedTuple):
    seq_id: int
    status: SequenceStatus
    num_prompt_tokens: int
    max_len: int  # maximum length in tokens, prompt included
    num_cached: int  # prompt tokens found in the prefix cache
    num_computed: int
    num_tokens: int  # prompt and output tokens known to the host
    arrival: int  # microseconds
    tables: list[HeldBlocks]  # one per group of layers

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that it holds, group by group."""
        return [block_id for table in self.tables for block_id in table.block_ids]


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
