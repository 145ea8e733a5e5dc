"""Outputs of the engine: records of finished requests, streamed pieces and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """The model's logprob for one token at one position."""

    logprob: float
    rank: int  # 1 for the most likely token
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str
    # The stop string or token, if any; "num_kvcache_blocks" if the output filled the KV cache.
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput(Mapping[str, Any]):
    """The output of one request; also a mapping, as in `output["text"]` or `dict(output)`.

    `outputs` holds all `n` completions; fields such as `text` belong to the first one.
    """

    seq_id: int
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length", "abort", or "error" with the reason in `error`
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    time_to_first_token: float  # seconds from arrival; 0.0 if there was no token
    duration: float  # seconds from arrival to the end
    error: str | None = None  # why the request failed, if it did
    # If requested, one dict per token, keyed by token id: the token itself, then the top tokens.
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None  # the first item is None
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)  # all completions
    pooled: list[float] | None = None  # pooled hidden states, not normalized, for `LLM.embed`
    queue_time: float = 0.0  # seconds from arrival to the first step; 0.0 if there was none
    request_id: str = ""  # chosen by the caller, or else the seq_id as a string
    num_accepted_tokens: int = 0  # draft tokens that were accepted (speculative decoding)
    num_rejected_tokens: int = 0  # draft tokens that were rejected

    @property
    def finished(self) -> bool:
        """Always True: a request has only one output; partial results are StreamPieces."""
        return True

    def __getitem__(self, field: str) -> Any:
        names = tuple(self)
        if field not in names:
            raise KeyError(f"{field!r} is not one of {', '.join(names)}")
        return getattr(self, field)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]  # [dim]
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """A document and its relevance to the query."""

    index: int  # index into the documents
    relevance_score: float  # a probability
    document: str


@dataclass(frozen=True, slots=True)
class Score:
    """The logprobs of a prompt's continuation."""

    logprob: float  # sum over all tokens of the continuation
    token_logprobs: list[float]
    token_ids: list[int]
    is_greedy: bool  # whether every token is the most likely one


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """New text and tokens of one streamed request; its last piece has an `output`."""

    seq_id: int
    text: str
    token_ids: list[int]
    output: RequestOutput | None
    logprobs: Sequence[dict[int, Logprob]] | None = None  # one dict per new token, if requested
    sample: int = 0  # index of the completion, below SamplingParams.n
    index: int = 0  # index of the prompt among those passed to `LLM.stream`
    request_id: str = ""

    @property
    def finished(self) -> bool:
        return self.output is not None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Finished requests, new pieces and token counts of one engine step."""

    finished: list[RequestOutput]
    pieces: list[StreamPiece]
    num_prefill_tokens: int
    num_decode_tokens: int
