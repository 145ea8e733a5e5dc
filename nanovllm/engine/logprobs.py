"""Log-probabilities as answers have them: by token id, with the text of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.engine.request import TokenLogprobs
from nanovllm.outputs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts(dict[int, str | None]):
    """The texts of the tokens that were asked for so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        tokenizer = self._tokenizer
        text = self[token_id] = None if tokenizer is None else str(tokenizer.decode([token_id]))
        return text


def as_dict(entry: TokenLogprobs, texts: TokenTexts) -> dict[int, Logprob]:
    """Of a token and the likeliest ones, which it may be one of: those have ranks from 1."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    logprobs: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        if token_id not in logprobs:
            logprobs[token_id] = Logprob(logprob, rank, texts[token_id])
    return logprobs
