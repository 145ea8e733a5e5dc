"""Inputs and outputs of the engine core: requests, new tokens and finished sequences."""

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
POOL_TOO_SMALL = "num_kvcache_blocks"  # stop_reason of a sequence that filled the whole KV cache


@dataclass(frozen=True, slots=True)
class Request:
    """A validated, tokenized prompt, to be continued or pooled."""

    seq_id: int
    token_ids: array[int]  # prompt tokens
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None  # constrains the output
    cache_salt: str | None = None
    is_streaming: bool = False  # each token is returned as soon as it is sampled, not at the end
    leader_id: int | None = None  # seq_id of the prompt's first sample, which must be added first
    pooling: Pooling | None = None  # pool the prompt's hidden states instead of generating
    arrival_time: float = field(default_factory=time.perf_counter)


def check_length(request: Request, max_len: int) -> None:
    """Raise PromptTooLongError if the prompt does not fit into a sequence of `max_len` tokens."""
    num_tokens, most, why = len(request.token_ids), max_len, ""
    if request.pooling is None:
        most, why = max_len - 1, " (one must be left for the output)"
    if num_tokens > most:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens, but only {most} fit{why}; shorten it, or "
            "raise max_model_len or num_kvcache_blocks"
        )


TokenLogprobs = bytes  # an entry for one position; `engine/logprobs.py` defines the layout


@dataclass(slots=True)
class DraftCounts:
    """Drafts since the engine started, or of one sequence."""

    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_rejected(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The tokens of a sequence that has ended, and why it ended."""

    seq_id: int
    token_ids: list[int]
    finish_reason: FinishReason
    num_cached_tokens: int
    start_time: float  # when its first step was scheduled; 0.0 if none was
    first_token_time: float  # 0.0 if there was no token
    end_time: float
    prompt_logprobs: list[TokenLogprobs]  # one per prompt token after the first, if requested
    pooled: Vector | None = None
    error: str | None = None  # message of a logits processor that failed
    stop_reason: str | None = None  # None or POOL_TOO_SMALL
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def stopped_at(self, num_tokens: int) -> FinishedSequence:
        """Return a copy that ends at a stop string; the core may have generated more tokens."""
        return replace(self, token_ids=self.token_ids[:num_tokens], finish_reason="stop")


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """The outputs of one call of `EngineCore.step`.

    `seq_ids`, `token_ids` and `logprobs` hold the new tokens of streaming sequences, including
    those that have just finished.
    """

    seq_ids: list[int]
    token_ids: list[int]
    finished: list[FinishedSequence]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per new token
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class StepTiming(NamedTuple):
    """Timing of one call of `EngineCore.step`, and of the step whose result it collected, if any.

    Times are seconds of `time.perf_counter`; snapshots convert them to microseconds.
    """

    begin: float
    # Durations of the four phases of the call.
    schedule: float
    submit: float  # includes computing the bitmasks
    wait: float
    commit: float
    device_begin: float  # earliest time at which the device could start the step
    device: float  # duration from `device_begin` to the arrival of the result
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_rows: int = 0  # 0 if no result was collected
    num_accepted_tokens: int = 0  # accepted drafts, which num_decode_tokens includes


class SequenceEnd(NamedTuple):
    """Timestamps of a finished sequence, in microseconds of `time.perf_counter`."""

    seq_id: int
    reason: FinishReason
    num_new_tokens: int
    start: int  # when its first step was scheduled; 0 if none was
    first_token: int  # 0 if there was no token
    end: int
    arrival: int


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
