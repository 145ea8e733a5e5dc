"""Messages between AsyncLLM and an engine core in a child process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.request import EngineCoreOutputs, FinishReason, Request

if TYPE_CHECKING:
    from nanovllm.serve.live.engine_state import EngineState

ControlAction = Literal["pause", "step", "resume"]


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Add requests; all samples of a prompt are in the same message."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class FinishSequence:
    """Finish a sequence early; the next update reports it as finished."""

    seq_id: int
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
    num_held_blocks: tuple[int, ...] = (0,)  # blocks that sequences hold, of each group of layers


def total(stats: list[CoreStats]) -> CoreStats:
    """Sum each field over several cores, which run the same model."""
    columns = {each.name: [getattr(one, each.name) for one in stats] for each in fields(CoreStats)}
    # A core that has not sent statistics yet does not know the number of groups.
    held = zip_longest(*columns.pop("num_held_blocks"), fillvalue=0)
    counts: dict[str, Any] = {name: sum(column) for name, column in columns.items()}
    return CoreStats(**counts, num_held_blocks=tuple(map(sum, held)))


@dataclass(frozen=True, slots=True)
class CoreUpdate:
    """Update sent after every step; while idle, every second, or every 0.1 s with a subscriber."""

    step: EngineCoreOutputs
    stats: CoreStats
    state: EngineState | None = None  # set only while a client is subscribed
