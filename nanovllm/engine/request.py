"""Inputs and outputs of the engine core: requests, new tokens and finished sequences."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Literal

from nanovllm.engine.grammar import Grammar
from nanovllm.engine.step import Pooling, Vector
from nanovllm.errors import PromptTooLongError
from nanovllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
POOL_TOO_SMALL = "num_kvcache_blocks"  # stop_reason of a sequence that filled the whole KV cache
BROKEN = (
    "the model's {} are NaN or infinite; the weights may be damaged, or too large for the dtype: "
    "try dtype='float32'"
)
NO_TOKEN_LEFT = (
    "no token can be sampled: structured_outputs, allowed_token_ids, bad_words, logit_bias, "
    "min_tokens and logits_processors together exclude every token or produce NaN; or "
)


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
    pooling: Pooling | None = None  # None: generate instead of pooling
    request_id: str = ""  # prompts with the same id take turns with other requests
    arrival_time: float = field(default_factory=time.perf_counter)

    def check_length(self, max_len: int) -> None:
        """Raise PromptTooLongError if the prompt does not fit into `max_len` tokens."""
        num_tokens, most, why = len(self.token_ids), max_len, ""
        if self.pooling is None:
            most, why = max_len - 1, " (one must be left for the output)"
        if num_tokens > most:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, but only {most} fit{why}; shorten it, or "
                "raise max_model_len or num_kvcache_blocks"
            )

    def why_broken(self) -> str:
        """Return the likely causes when a step produced no valid token or vector."""
        if self.pooling is not None:
            return BROKEN.format("hidden states")
        is_edited = self.grammar is not None or self.params.can_exclude_tokens
        return (NO_TOKEN_LEFT if is_edited else "") + BROKEN.format("logits")


TokenLogprobs = bytes  # an entry for one position; `engine/logprobs.py` defines the layout


@dataclass(slots=True)
class DraftCounts:
    """Draft statistics since the engine started, or of one sequence."""

    num_drafts: int = 0  # number of rows with draft tokens
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    @property
    def num_draft_tokens(self) -> int:
        return self.num_accepted_tokens + self.num_rejected_tokens

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_accepted_tokens += num_accepted
        self.num_rejected_tokens += num_draft_tokens - num_accepted


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
        """Return a copy truncated to `num_tokens`, which end with a stop string."""
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
