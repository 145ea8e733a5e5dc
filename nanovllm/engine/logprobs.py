"""Log-probabilities as answers have them: by token id, with the text of every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from nanovllm.engine.packed_logprobs import PAIR_BYTES, RANK_BYTES, entry_bytes
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
        text = self[token_id] = None if tokenizer is None else text_within(tokenizer, token_id)
        return text


def text_within(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """A token's text after others: SentencePiece drops the space with which a text begins."""
    alone, twice = (str(tokenizer.decode([token_id] * count)) for count in (1, 2))
    return f" {alone}" if twice == f"{alone} {alone}" else alone


class AnswerLogprobs(Sequence[dict[int, Logprob]]):
    """Those of every token of an answer, each made when it is looked at.

    Equal to a list of the same; pickled or copied, it becomes one.
    """

    def __init__(self, entries: Iterable[TokenLogprobs], num_best: int, texts: TokenTexts) -> None:
        self._data, self._num_best, self._texts = b"".join(entries), num_best, texts
        self._width = entry_bytes(num_best)

    @property
    def cumulative(self) -> float:
        """The sum of those of the answer's own tokens."""
        first, step = (RANK_BYTES + PAIR_BYTES) // 4 - 1, self._width // 4
        numbers = np.frombuffer(self._data, np.float32) if self._data else np.zeros(0, np.float32)
        return float(sum(numbers[first::step].tolist()))

    def __len__(self) -> int:
        return len(self._data) // self._width

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[each] for each in found]
        start = found * self._width
        return as_dict(self._data[start : start + self._width], self._texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[dict[int, Logprob]]]]:
        return list, (list(self),)


def as_dict(entry: TokenLogprobs, texts: TokenTexts) -> dict[int, Logprob]:
    """Of a token and the likeliest ones, which it may be one of: those have ranks from 1."""
    numbers = np.frombuffer(entry, np.int32)
    ids = numbers[1::2].tolist()
    ranks = [int(numbers[0]), *range(1, len(ids))]
    values = numbers[2::2].view(np.float32).tolist()
    logprobs: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(ids, values, ranks, strict=True):
        if token_id not in logprobs:
            logprobs[token_id] = Logprob(logprob, rank, texts[token_id])
    return logprobs
