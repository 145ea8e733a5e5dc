"""What the engine hands back: a record per finished request, per streamed piece, per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """How likely the model found a token, whatever was then sampled."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str
    # The stop string or token that ended it; "num_kvcache_blocks" if the KV cache holds no more.
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput(Mapping[str, Any]):
    """The answer to one prompt; also a mapping, as in `output["text"]` or `dict(output)`.

    Where several samples were asked for, what is not in `outputs` is the first one's.
    """

    seq_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length", "abort", or "error" with a text in `error`
    num_cached_tokens: int  # prompt tokens served by the prefix cache
    time_to_first_token: float  # seconds from arrival; 0.0 when there was no token
    duration: float  # seconds from arrival to the last token
    error: str | None = None  # why the request failed, if it did
    # If asked for: of every token, by token id; the token itself first, then the most likely ones.
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for its first token
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)  # all samples
    pooled: list[float] | None = None  # what `LLM.embed` makes an embedding of
    queue_time: float = 0.0  # seconds from arrival to the first step; 0.0 when there was none
    request_id: str = ""  # the caller's own, or the seq_id as a text

    @property
    def finished(self) -> bool:
        """Always True: this is the last output of a request, and pieces are what precedes it."""
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
    """The vector of one prompt."""

    embedding: list[float]  # as many as the model's hidden size
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a continuation of a prompt."""

    logprob: float  # of all its tokens
    token_logprobs: list[float]
    token_ids: list[int]
    is_greedy: bool  # whether each token is the most likely


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """New text and tokens of one streamed request; `output` is set on its last piece."""

    seq_id: int
    text: str
    token_ids: list[int]
    output: RequestOutput | None
    logprobs: Sequence[dict[int, Logprob]] | None = None  # of token_ids, if asked for
    sample: int = 0  # of several
    index: int = 0  # of the prompt among those given to `LLM.stream`
    request_id: str = ""

    @property
    def finished(self) -> bool:
        return self.output is not None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step finished, what is new of each request, and how many tokens it ran."""

    finished: list[RequestOutput]
    pieces: list[StreamPiece]
    num_prefill_tokens: int
    num_decode_tokens: int
