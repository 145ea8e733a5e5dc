"""Log-probabilities as answers have them: by token id, with the text of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


class LogprobList(Sequence[Any]):
    """A dict for each position, or None, made when it is read: many never are.

    Making thousands takes long, and so the reader's thread does it, not the engine's.
    """

    def __init__(self, entries: Sequence[TokenLogprobs | None], texts: TokenTexts) -> None:
        self._entries, self._texts = entries, texts

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._as_dict(entry) for entry in self._entries[index]]
        return self._as_dict(self._entries[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy needs no tokenizer

    def _as_dict(self, entry: TokenLogprobs | None) -> dict[int, Logprob] | None:
        """Of a token and the likeliest ones, which it may be one of: those have ranks from 1."""
        if entry is None:
            return None
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        columns = zip(entry.token_ids, entry.logprobs, ranks, strict=True)
        logprobs: dict[int, Logprob] = {}
        for token_id, logprob, rank in columns:
            if token_id not in logprobs:
                logprobs[token_id] = Logprob(logprob, rank, self._texts[token_id])
        return logprobs
