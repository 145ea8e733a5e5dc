"""What changes logits between the model and the sampler, for the rows that ask for it.

Users may rely on the order of `LogitsEdits.apply` (docs/requests.md). Functions of their own come
after it. The newest token of a row may be known to the device alone, so `LogitsEdits` reads tokens
from the slot tables, and never waits for the device.
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

# Of the rows that are edited together, each padded to the longest: their tensors take some 60 MB,
# whatever the length of sequences, and no part of the profiled step.
MAX_TOKENS = 1 << 20


@dataclass(slots=True, eq=False)
class Asked:
    """What the sequence in a slot asks for beside sampling, and what its steps remember for it."""

    row: NewRow
    has_edits: bool
    allowed: Tensor | None  # token ids, on the device
    processors: list[Processor | str]
    output_ids: list[int]  # complete for processors, whose rows run when all tokens are known
    pooled: Tensor | None = None  # [hidden_size], the sum over the chunks so far

    def process(self, logits: Tensor) -> str | None:
        """Call the processors on logits [vocab_size], in place; return why one failed, if so."""
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
    row: int  # of the logits
    slot: int
    position: int  # of the token to be sampled
    asked: Asked


class LogitsEdits:
    def __init__(self, tables: InputBatch) -> None:
        self.tables = tables

    def asked_by(self, row: NewRow) -> Asked:
        params = row.params
        allowed, processors = params.allowed_token_ids, list(params.logits_processors)
        is_biased = params.has_penalties or params.logit_bias
        return Asked(
            row,
            bool(is_biased or params.can_exclude_tokens or row.bad_words),
            None if allowed is None else self._upload(sorted(set(allowed))),
            [] if params.max_tokens == 0 else processors,
            row.token_ids[row.num_prompt_tokens :].tolist() if processors else [],
        )

    def apply(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Edit rows of the logits [sampled rows, vocab_size] in place."""
        limited = [(row.row, row.asked.allowed) for row in rows if row.asked.allowed is not None]
        for some in in_pieces(limited, lambda pair: len(pair[1])):
            self._keep_allowed(logits, some)
        self._forbid_bad_words(logits, [row for row in rows if row.asked.row.bad_words])
        self._add_bias(logits, rows)
        penalised = [row for row in rows if row.asked.row.params.has_penalties]
        for piece in in_pieces(penalised, lambda row: row.position):
            self._penalise(logits, piece)

    def _keep_allowed(self, logits: Tensor, rows: list[tuple[int, Tensor]]) -> None:
        """Keep only the logits of some token ids in some rows."""
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
        """Forbid the last token of a word where the answer ends in all the others of it."""
        words = [(edited, word) for edited in rows for word in edited.asked.row.bad_words]
        if not words:
            return
        longest = max(len(word) for _, word in words)
        before = np.full((len(words), longest - 1), -1, np.int64)  # -1: any token, or none
        for index, (_, word) in enumerate(words):
            before[index, longest - len(word) :] = word[:-1]
        offsets = [edited.row * logits.shape[1] + word[-1] for edited, word in words]
        slots, positions = (
            self._upload([getattr(edited, name) for edited, _ in words])
            for name in ("slot", "position")
        )
        wanted = self.tables.device.upload(before)
        steps = torch.arange(1 - longest, 0, device=wanted.device)
        places = positions[:, None] + steps
        tokens = self.tables.tokens[slots[:, None], places.clamp(min=0)]
        is_answer = places >= self.tables.prompt_lens[slots][:, None]
        is_match = ((tokens == wanted) & is_answer) | (wanted < 0)
        ceiling = torch.where(is_match.all(1), -torch.inf, torch.inf).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, self._upload(offsets), ceiling, "amin")

    def _add_bias(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Add each row's bias; stop tokens that come too early get one of minus infinity."""
        entries: list[tuple[int, float]] = []
        for edited in rows:
            first, row = edited.row * logits.shape[1], edited.asked.row
            bias = (row.params.logit_bias or {}).items()
            entries += [(first + token_id, value) for token_id, value in bias]
            if edited.position < row.num_prompt_tokens + row.params.min_tokens:
                entries += [(first + token_id, -np.inf) for token_id in sorted(row.stop_token_ids)]
        if entries:
            offsets = self._upload([offset for offset, _ in entries])
            values = np.array([value for _, value in entries], np.float32)
            added = self.tables.device.upload(values).to(logits.dtype)
            logits.view(-1).index_add_(0, offsets, added)

    def _penalise(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Lower what was said before: see `penalise`."""
        tables, max_len = self.tables, max(row.position for row in rows)
        indices, slots, lengths = (
            self._upload([getattr(row, name) for row in rows])
            for name in ("row", "slot", "position")
        )
        tokens = tables.tokens[slots, :max_len]  # [rows, max_len]
        place = torch.arange(max_len, device=tokens.device, dtype=torch.int32)
        is_known = place < lengths[:, None]
        is_answer = is_known & (place >= tables.prompt_lens[slots][:, None])
        # A place beyond the row's tokens repeats its first one, which changes nothing.
        tokens = torch.where(is_known, tokens, tokens[:, :1])
        places = indices[:, None], tokens.long()
        values = logits[places].float()
        columns = (tables.presence, tables.frequency, tables.repetition)
        penalties = [column[slots][:, None] for column in columns]
        values = penalise(values, count_in(tokens, is_answer), *penalties)
        logits[places] = values.to(logits.dtype)

    def _upload(self, numbers: list[int]) -> Tensor:
        return self.tables.device.upload(np.array(numbers, np.int64))


def in_pieces(rows: list[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield rows of similar length together, as many as MAX_TOKENS permits."""
    piece: list[T] = []
    for row in sorted(rows, key=num_tokens):
        if piece and (len(piece) + 1) * num_tokens(row) > MAX_TOKENS:
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece


def penalise(
    logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Return the new logits of tokens that were said before, `counts` times in the answer."""
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * counts - presence * (counts > 0)


def count_in(tokens: Tensor, is_counted: Tensor) -> Tensor:
    """For each token (int32) of a row, how often it is among the row's counted ones."""
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
    """Return what a processor returned, if it can take the place of what it was given."""
    if not isinstance(new, Tensor):
        raise TypeError(f"it must return the logits, a tensor, not {type(new).__name__}")
    if new.shape != old.shape or new.dtype != torch.float32:
        found, wanted = list(new.shape), list(old.shape)
        raise ValueError(f"it must return float32 logits {wanted}, not {new.dtype} {found}")
    return new


def _shown(value: object) -> str:
    """Return a text for a message; the repr of a caller's object may fail."""
    try:
        return value if isinstance(value, str) else repr(value)
    except Exception:
        return type(value).__name__
