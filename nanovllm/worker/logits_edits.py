"""Edit logits between the model and the sampler, for the rows that request it.

Users may rely on the order of the edits in `LogitsEdits.apply` (docs/offline.md); logits processors
run afterwards. A row's last token may be known only to the device, so `LogitsEdits` reads tokens
from the InputBatch and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import NewRow
from nanovllm.worker.input_batch import InputBatch

T = TypeVar("T")
Processor = Callable[[list[int], Tensor], Tensor]

# Maximum number of tokens, including padding, in rows that are edited together. It limits the
# temporary tensors, which the profile run does not measure, to about 60 MB.
MAX_TOKENS = 1 << 20


@dataclass(slots=True, eq=False)
class SlotExtras:
    """State of the features beyond plain sampling that a slot's sequence requested."""

    row: NewRow
    has_edits: bool
    allowed: Tensor | None  # allowed token ids, on the device; None: all
    processors: list[Processor | str]  # strings are names, imported on first use
    output_ids: list[int]  # output tokens; maintained only if there are processors
    pooled: Tensor | None = None  # [hidden_size], sum over the prefill chunks so far

    def process(self, logits: Tensor) -> str | None:
        """Apply the processors to logits [vocab_size] in place; return a message if one fails."""
        new = logits.to(torch.float32, copy=True)
        for index, processor in enumerate(self.processors):
            try:
                if isinstance(processor, str):
                    processor = self.processors[index] = import_processor(processor)
                new = check_logits(processor(list(self.output_ids), new), logits)
            except (Exception, SystemExit) as error:
                logits.fill_(torch.nan)
                name = getattr(processor, "__name__", processor)
                return f"logits_processors[{index}] ({_shown(name)}) failed: {_shown(error)}"
        logits.copy_(new)
        return None


@dataclass(frozen=True, slots=True)
class EditedRow:
    """A sampled row whose logits are edited."""

    row: int  # index into the logits
    slot: int
    position: int  # position of the token to be sampled
    extras: SlotExtras


class LogitsEdits:
    """Applies allowed tokens, bad words, biases and penalties to logits."""

    def __init__(self, input_batch: InputBatch) -> None:
        self.input_batch = input_batch

    def extras_of(self, row: NewRow) -> SlotExtras:
        params = row.params
        allowed, processors = params.allowed_token_ids, list(params.logits_processors)
        is_biased = params.has_penalties or params.logit_bias
        return SlotExtras(
            row,
            bool(is_biased or params.can_exclude_tokens or row.bad_words),
            None if allowed is None else self._upload(sorted(set(allowed))),
            [] if params.max_tokens == 0 else processors,
            row.token_ids[row.num_prompt_tokens :].tolist() if processors else [],
        )

    def apply(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Edit rows of the logits [sampled rows, vocab_size] in place."""
        limited = [(row.row, row.extras.allowed) for row in rows if row.extras.allowed is not None]
        for some in in_pieces(limited, lambda pair: len(pair[1])):
            self._keep_allowed(logits, some)
        self._forbid_bad_words(logits, [row for row in rows if row.extras.row.bad_words])
        self._add_bias(logits, rows)
        penalized = [row for row in rows if row.extras.row.params.has_penalties]
        for piece in in_pieces(penalized, lambda row: row.position):
            self._penalize(logits, piece)

    def _keep_allowed(self, logits: Tensor, rows: list[tuple[int, Tensor]]) -> None:
        """Set the logits of each row to -inf, except those of its allowed token ids."""
        indices = self._upload([row for row, _ in rows])
        lengths = [len(allowed) for _, allowed in rows]
        firsts = torch.repeat_interleave(
            indices * logits.shape[1], self._upload(lengths), output_size=sum(lengths)
        )
        offsets = torch.cat([allowed for _, allowed in rows]) + firsts
        kept = logits.view(-1)[offsets]
        logits.index_fill_(0, indices, -torch.inf)
        logits.view(-1)[offsets] = kept

    def _forbid_bad_words(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Mask the last token of a bad word if the output ends with all tokens before it."""
        words = [(edited, word) for edited in rows for word in edited.extras.row.bad_words]
        if not words:
            return
        longest = max(len(word) for _, word in words)
        before = np.full((len(words), longest - 1), -1, np.int64)  # -1 matches any token
        for index, (_, word) in enumerate(words):
            before[index, longest - len(word) :] = word[:-1]
        offsets = [edited.row * logits.shape[1] + word[-1] for edited, word in words]
        slots, positions = (
            self._upload([getattr(edited, name) for edited, _ in words])
            for name in ("slot", "position")
        )
        wanted = self.input_batch.device.upload(before)
        steps = torch.arange(1 - longest, 0, device=wanted.device)
        previous = positions[:, None] + steps
        tokens = self.input_batch.tokens[slots[:, None], previous.clamp(min=0)]
        is_output = previous >= self.input_batch.prompt_lens[slots][:, None]
        is_match = ((tokens == wanted) & is_output) | (wanted < 0)
        ceiling = torch.where(is_match.all(1), -torch.inf, torch.inf).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, self._upload(offsets), ceiling, "amin")

    def _add_bias(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Add each row's logit_bias; mask stop tokens until `min_tokens` tokens are generated."""
        entries: list[tuple[int, float]] = []
        for edited in rows:
            first, row = edited.row * logits.shape[1], edited.extras.row
            bias = (row.params.logit_bias or {}).items()
            entries += [(first + token_id, value) for token_id, value in bias]
            if edited.position < row.num_prompt_tokens + row.params.min_tokens:
                entries += [(first + token_id, -np.inf) for token_id in sorted(row.stop_token_ids)]
        if entries:
            offsets = self._upload([offset for offset, _ in entries])
            values = np.array([value for _, value in entries], np.float32)
            added = self.input_batch.device.upload(values).to(logits.dtype)
            logits.view(-1).index_add_(0, offsets, added)

    def _penalize(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Apply `penalize` to the logits of all tokens in the prompt and the output."""
        input_batch, max_len = self.input_batch, max(row.position for row in rows)
        indices, slots, lengths = (
            self._upload([getattr(row, name) for row in rows])
            for name in ("row", "slot", "position")
        )
        tokens = input_batch.tokens[slots, :max_len]  # [rows, max_len]
        position = torch.arange(max_len, device=tokens.device, dtype=torch.int32)
        # The placeholders of images, which have negative ids, are not penalized.
        is_known = (position < lengths[:, None]) & (tokens >= 0)
        is_output = is_known & (position >= input_batch.prompt_lens[slots][:, None])
        # All other positions repeat a token of the row, which has no effect.
        repeated = torch.where(is_known, tokens, -1).amax(1, keepdim=True)
        tokens = torch.where(is_known, tokens, repeated)
        entries = indices[:, None], tokens.long()
        values = logits[entries].float()
        columns = (input_batch.presence, input_batch.frequency, input_batch.repetition)
        penalties = [column[slots][:, None] for column in columns]
        values = penalize(values, count_in(tokens, is_output), *penalties)
        logits[entries] = values.to(logits.dtype)

    def _upload(self, numbers: list[int]) -> Tensor:
        return self.input_batch.device.upload(np.array(numbers, np.int64))


def in_pieces(rows: list[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of rows of similar length; a padded group has at most MAX_TOKENS tokens."""
    piece: list[T] = []
    for row in sorted(rows, key=num_tokens):
        if piece and (len(piece) + 1) * num_tokens(row) > MAX_TOKENS:
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece


def penalize(
    logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Return the penalized logits of tokens that occur in the prompt or output.

    `counts` holds how often each token occurs in the output.
    """
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * counts - presence * (counts > 0)


def count_in(tokens: Tensor, is_counted: Tensor) -> Tensor:
    """Return how often each token (int32) of a row occurs among the row's counted tokens."""
    ordered = torch.where(is_counted, tokens, -1).sort(-1).values
    after = torch.searchsorted(ordered, tokens, right=True, out_int32=True)
    return after - torch.searchsorted(ordered, tokens, out_int32=True)


def import_processor(path: str) -> Processor:
    module, _, names = path.partition(":")
    processor = reduce(getattr, names.split("."), import_module(module))
    if not callable(processor):
        raise TypeError(f"{path} is not a function")
    return processor


def check_logits(new: Any, old: Tensor) -> Tensor:
    """Return a processor's result; raise unless it is float32 logits with the shape of `old`."""
    if not isinstance(new, Tensor):
        raise TypeError(f"it must return the logits, a tensor, not {type(new).__name__}")
    if new.shape != old.shape or new.dtype != torch.float32:
        found, wanted = list(new.shape), list(old.shape)
        raise ValueError(f"it must return float32 logits {wanted}, not {new.dtype} {found}")
    return new


def _shown(value: object) -> str:
    """Return a value as text for an error message; a caller's `__repr__` may raise."""
    try:
        return value if isinstance(value, str) else repr(value)
    except Exception:
        return type(value).__name__
