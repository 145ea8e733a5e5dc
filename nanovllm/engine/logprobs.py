"""Logprobs: packed into bytes within the engine, and unpacked to dicts in outputs."""

from __future__ import annotations

from collections import abc
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from nanovllm.engine.request import TokenLogprobs
from nanovllm.outputs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.engine.scheduler import Step

T = TypeVar("T")

# An entry describes one position: a rank, then pairs of a token id and a logprob. Each number has 4
# bytes. The rank and the first pair belong to the token at that position, the other pairs to the
# top tokens. Entries are bytes: creating objects for every token took longer than a GPU step.
RANK_BYTES, PAIR_BYTES = 4, 8
Columns = abc.Mapping[str, npt.NDArray[Any]]  # of a StepResult


def pack_logprobs(columns: Columns, prefix: str = "") -> abc.Iterator[TokenLogprobs]:
    """Yield an entry for each row of the three columns of logprobs in a StepResult."""
    names = "logprob_ids", "logprobs", "logprob_ranks"
    ids, logprobs, ranks = (columns[prefix + name] for name in names)
    pairs = np.stack((ids, logprobs.view(np.int32)), 2).reshape(len(ids), -1)
    packed = np.concatenate((ranks[:, None], pairs), 1, dtype=np.int32)
    data, width = packed.tobytes(), 4 * packed.shape[1]
    return (data[start : start + width] for start in range(0, len(data), width))


def entry_bytes(num_top: int | None) -> int:
    """Return the size of an entry with `num_top` top tokens; a step's entries may be larger."""
    return RANK_BYTES + PAIR_BYTES * (1 + (num_top or 0))


def add_logprobs(step: Step, columns: Columns) -> None:
    """Store the logprobs of a step in the sequences that requested them."""
    if "prompt_logprobs" in columns:
        _add_prompt_logprobs(step, pack_logprobs(columns, "prompt_"))
    if "logprobs" not in columns:
        return
    entries = pack_logprobs(columns)
    for seq, count in zip(step.rows, step.num_logits, strict=True):
        if (num_top := seq.request.params.logprobs) is None:
            continue
        new = [entry[: entry_bytes(num_top)] for entry in islice(entries, count)]
        is_over = seq.finish_reason is not None or seq in step.dropped
        seq.new_logprobs = [] if is_over else new


def _add_prompt_logprobs(step: Step, entries: abc.Iterator[TokenLogprobs]) -> None:
    """Append the prompt logprobs that a step computed to the sequences that requested them."""
    for seq, start, count in zip(step.rows, step.starts, step.counts, strict=True):
        num_top = seq.request.params.prompt_logprobs
        if num_top is None:
            continue
        for position in range(start, start + num_scored(start, count, seq.num_prompt_tokens)):
            entry = next(entries)
            if position == len(seq.prompt_logprobs):  # else recomputed after a preemption
                seq.prompt_logprobs.append(entry[: entry_bytes(num_top)])


class TokenTexts(dict[int, str | None]):
    """A cache of token texts, keyed by token id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        tokenizer = self._tokenizer
        text = self[token_id] = None if tokenizer is None else text_within(tokenizer, token_id)
        return text


def text_within(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return a token's text as it appears mid-sentence; decoded alone, it may lose a space."""
    alone, twice = (str(tokenizer.decode([token_id] * count)) for count in (1, 2))
    return f" {alone}" if twice == f"{alone} {alone}" else alone


class LazySequence(abc.Sequence[T]):
    """A sequence that creates its items on access.

    It equals a list of the same items, and becomes one when pickled or copied.
    """

    def item(self, index: int) -> T:
        """Create the item at `index`, which is not negative."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        found = range(len(self))[index]
        return [self.item(each) for each in found] if isinstance(found, range) else self.item(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[T]]]:
        return list, (list(self),)


class CompletionLogprobs(LazySequence[dict[int, Logprob]]):
    """The logprobs of a completion's tokens."""

    def __init__(
        self, entries: abc.Iterable[TokenLogprobs], num_top: int, texts: TokenTexts
    ) -> None:
        self._data, self._texts = b"".join(entries), texts
        self._width = entry_bytes(num_top)

    @property
    def cumulative(self) -> float:
        """Sum of the logprobs of the completion's own tokens."""
        first, step = (RANK_BYTES + PAIR_BYTES) // 4 - 1, self._width // 4
        numbers = np.frombuffer(self._data, np.float32) if self._data else np.zeros(0, np.float32)
        return float(sum(numbers[first::step].tolist()))

    def __len__(self) -> int:
        return len(self._data) // self._width

    def item(self, index: int) -> dict[int, Logprob]:
        start = index * self._width
        return as_dict(self._data[start : start + self._width], self._texts)


class PromptLogprobs(LazySequence[dict[int, Logprob] | None]):
    """The logprobs of a prompt's tokens; None for the first one, which nothing predicts."""

    def __init__(self, others: CompletionLogprobs) -> None:
        self._others = others

    def __len__(self) -> int:
        return 1 + len(self._others)

    def item(self, index: int) -> dict[int, Logprob] | None:
        return self._others.item(index - 1) if index else None


def as_dict(entry: TokenLogprobs, texts: TokenTexts) -> dict[int, Logprob]:
    """Unpack an entry into a dict: the token at the position, then the other top tokens."""
    numbers = np.frombuffer(entry, np.int32)
    ids = numbers[1::2].tolist()
    ranks = [int(numbers[0]), *range(1, len(ids))]
    values = numbers[2::2].view(np.float32).tolist()
    logprobs: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(ids, values, ranks, strict=True):
        if token_id not in logprobs:
            logprobs[token_id] = Logprob(logprob, rank, texts[token_id])
    return logprobs


def num_scored(start: int, count: int, num_prompt_tokens: int) -> int:
    """Return how many of a row's positions predict a prompt token, for prompt logprobs.

    These are the row's first positions; each predicts the token that follows it.
    """
    return max(0, min(start + count, num_prompt_tokens - 1) - start)
