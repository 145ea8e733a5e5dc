"""What crosses the engine core's boundary: requests in, tokens and finished sequences out."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from nanovllm.engine.grammar import Grammar
from nanovllm.engine.step import Pooling, Vector
from nanovllm.errors import PromptTooLongError
from nanovllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
POOL_TOO_SMALL = "num_kvcache_blocks"  # stop_reason of a sequence for which the pool is too small


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, or to pool, checked and tokenized."""

    seq_id: int
    token_ids: array[int]  # the prompt
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None  # of the answer
    cache_salt: str | None = None
    is_streaming: bool = False  # wants every token as it comes, not only at the end
    leader_id: int | None = None  # the request for the first sample of this prompt, added before
    pooling: Pooling | None = None  # wants the prompt's hidden states, and no token
    arrival_time: float = field(default_factory=time.perf_counter)


def check_length(request: Request, max_len: int) -> None:
    """Raise PromptTooLongError for a prompt that can never run where sequences end at `max_len`."""
    num_tokens, most, why = len(request.token_ids), max_len, ""
    if request.pooling is None:
        most, why = max_len - 1, " (one must be left to generate)"
    if num_tokens > most:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens, but only {most} fit{why}; shorten it, or "
            "raise max_model_len or num_kvcache_blocks"
        )


TokenLogprobs = bytes  # of one position, as `engine/logprobs.py` lays them out


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence is over: all that it generated, and why it ended."""

    seq_id: int
    token_ids: list[int]
    finish_reason: FinishReason
    num_cached_tokens: int
    start_time: float  # of its first step; 0.0 when there was none
    first_token_time: float  # 0.0 when there was no token
    end_time: float
    prompt_logprobs: list[TokenLogprobs]  # of every prompt token but the first, if asked for
    pooled: Vector | None = None
    error: str | None = None  # of a processor of its own
    stop_reason: str | None = None  # POOL_TOO_SMALL, if that is why

    def stopped_at(self, num_tokens: int) -> FinishedSequence:
        """By a stop string, after so many tokens; the core may have gone on."""
        return replace(self, token_ids=self.token_ids[:num_tokens], finish_reason="stop")


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """The outputs of one call of `EngineCore.step`.

    The columns hold the new tokens of streaming sequences, including the last one.
    """

    seq_ids: list[int]
    token_ids: list[int]
    finished: list[FinishedSequence]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of each new token
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class StepTiming(NamedTuple):
    """Timing of one call of `EngineCore.step`, and the step whose result it collected, if any.

    Seconds of `time.perf_counter`; microseconds in a snapshot.
    """

    begin: float
    schedule: float  # durations of the parts of the call
    submit: float  # with computing the masks of grammars
    wait: float
    commit: float
    device_begin: float  # when the step could begin
    device: float  # from then until its result was there
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_rows: int = 0  # 0 without a result


class SequenceEnd(NamedTuple):
    """The times of a finished sequence, in microseconds of `time.perf_counter`."""

    seq_id: int
    reason: FinishReason
    num_new_tokens: int
    start: int  # of its first step; 0 when there was none
    first_token: int  # 0 when there was none
    end: int
    arrival: int


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
