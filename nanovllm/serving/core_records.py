"""What crosses between a front and a core that runs in a process of its own; beside requests."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig
from nanovllm.engine.request import CoreStep, FinishReason, Request
from nanovllm.engine.step import ExecutorInfo

if TYPE_CHECKING:
    from nanovllm.serving.state_records import EngineNews


@dataclass(frozen=True, slots=True)
class StartCore:
    config: EngineConfig
    log_level: int
    replica: int = 0  # which one of config.data_parallel_size


@dataclass(frozen=True, slots=True)
class Add:
    """Requests that came together; the samples of a prompt do."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Finish:
    """End some sequences; an update will have their endings, unless nothing is wanted of them."""

    seq_ids: list[int]
    reason: FinishReason
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """Show the engine's state from now on, from the whole of it; or no more."""

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


@dataclass(frozen=True, slots=True)
class CoreUpdate:
    """The result of a step, or an empty one every second while the core is idle."""

    step: CoreStep
    stats: CoreStats
    news: EngineNews | None = None  # for those who watch
