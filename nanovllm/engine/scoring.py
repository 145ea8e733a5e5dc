"""Embeddings, logprobs of continuations, and the columns of a StepResult that they come from."""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.prompts import as_prompt
from nanovllm.engine.request import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Pooling, Vector
from nanovllm.errors import ConfigError, EngineError
from nanovllm.outputs import EmbeddingOutput, RequestOutput, Score
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require

if TYPE_CHECKING:
    from nanovllm.engine.logprobs import Columns
    from nanovllm.engine.scheduler import Step

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def check_bidirectional(attention_backend: str) -> None:
    """Raise ConfigError if a backend cannot attend to later tokens, as some embedding models do."""
    if attention_backend not in ("auto", "sdpa"):
        raise ConfigError(
            f"attention_backend={attention_backend!r} has no bidirectional attention; use 'auto' "
            "or 'sdpa'",
            param="attention_backend",
        )


def check_pooling(pooling: Pooling, vocab_size: int) -> None:
    is_valid = pooling in ("last", "mean")
    if isinstance(pooling, tuple):
        is_valid = len(pooling) == 2 and all(0 <= token_id < vocab_size for token_id in pooling)
    require(is_valid, "pooling", '"last" or "mean"', pooling)


def add_columns(step: Step, columns: Columns) -> list[tuple[Sequence, FinishReason]]:
    """Store the logprobs and pooled vectors of a step in their sequences.

    Returns the sequences that a pooled vector completes, each with its finish reason.
    """
    from nanovllm.engine.logprobs import add_logprobs

    add_logprobs(step, columns)
    return _add_pooled(step, columns["pooled"]) if "pooled" in columns else []


def _add_pooled(step: Step, pooled: Vector) -> list[tuple[Sequence, FinishReason]]:
    complete = [
        seq
        for seq, start, count in zip(step.rows, step.starts, step.counts, strict=True)
        if seq.request.pooling is not None and start + count == seq.num_prompt_tokens
    ]
    ended: list[tuple[Sequence, FinishReason]] = []
    for seq, vector in zip(complete, pooled, strict=True):
        seq.pooled = vector[:2] if isinstance(seq.request.pooling, tuple) else vector
        if seq.finish_reason is None:
            ended.append((seq, "length" if np.isfinite(seq.pooled).all() else "error"))
    return ended


def embedding_of(output: RequestOutput, normalize: bool) -> EmbeddingOutput:
    if output.finish_reason != "length":
        raise EngineError(output.error or "the embedding was aborted")
    vector = np.array(output.pooled, np.float32)
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return EmbeddingOutput(vector.tolist(), output.prompt_token_ids)


def score(
    complete: Callable[..., list[RequestOutput]],
    encode: Callable[..., array[int]],
    prompt: Any,
    continuations: abc.Sequence[Any],
    cache_salt: str | None,
) -> list[Score]:
    """Implement `LLM.score`; `complete` runs prompts, `encode` tokenizes them."""
    first = as_prompt(prompt, cache_salt)
    continued = continue_prompt(first.content, continuations, encode)
    wholes = [each.token_ids for each in continued]
    outputs = complete(wholes, SCORED, first.cache_salt)
    return [score_of(output, one.start) for output, one in zip(outputs, continued, strict=True)]


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt followed by a continuation, which begins at token `start`."""

    start: int
    token_ids: list[int]


def continue_prompt(
    prompt: str | list[int], continuations: abc.Sequence[Any], encode: Callable[..., array[int]]
) -> list[Continued]:
    """Tokenize a prompt together with each continuation.

    A token may span the end of the prompt; the continuation then begins with that token.
    """
    is_list = not isinstance(continuations, str)
    require(is_list, "continuations", "a list of texts or of token ids", continuations)
    ids = encode(prompt).tolist()
    continued = []
    for index, item in enumerate(continuations):
        continuation = item if isinstance(item, (str, Mapping)) else as_prompt(item).content
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = encode(prompt + continuation).tolist()
        else:
            whole = ids + encode(continuation, add_special_tokens=False).tolist()
        pairs = enumerate(zip(ids, whole, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(whole)))
        name, expected = f"continuations[{index}]", "a continuation that adds tokens to the prompt"
        require(0 < start < len(whole), name, expected, item)
        continued.append(Continued(start, whole))
    return continued


def score_of(output: RequestOutput, start: int) -> Score:
    """Compute the score of the tokens from `start` on, given the prompt logprobs."""
    if output.finish_reason != "length":
        raise EngineError(output.error or "the score was aborted")
    assert output.prompt_logprobs is not None
    token_ids = output.prompt_token_ids[start:]
    entries = [
        (entry or {})[token_id]
        for token_id, entry in zip(token_ids, output.prompt_logprobs[start:], strict=True)
    ]
    logprobs = [entry.logprob for entry in entries]
    return Score(sum(logprobs), logprobs, token_ids, all(entry.rank == 1 for entry in entries))
