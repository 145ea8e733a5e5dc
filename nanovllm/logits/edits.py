"""What changes logits between the model and the sampler, for the rows that ask for it.

Users may rely on the order of `LogitsEdits.apply` (docs/requests.md). Functions of their own come
after it: processors.py.

The newest token of a row may be known to the device alone, so whatever depends on tokens reads them
from the slot tables, and nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.step import NewRow, StepPlan
from nanovllm.worker.batch import sampled_rows
from nanovllm.worker.tables import BySlot, SlotTables

# Of the rows that are edited together, each padded to the longest: their tensors take some 60 MB,
# whatever the length of sequences, and no part of the profiled step.
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What one sequence asks for."""

    min_len: int  # while it is shorter, it must not sample any of early_stops
    early_stops: list[int]
    bias: dict[int, float]
    allowed: Tensor | None  # token ids, on the device
    bad_words: list[tuple[int, ...]]
    is_penalised: bool


@dataclass(frozen=True, slots=True)
class EditedRow:
    row: int  # of the logits
    slot: int
    position: int  # of the token to be sampled
    edits: RowEdits

    @property
    def allowed(self) -> Tensor:
        assert self.edits.allowed is not None
        return self.edits.allowed


class LogitsEdits:
    """Edits the rows whose sequences ask for it."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        self._edits: BySlot[RowEdits] = BySlot()

    def update(self, plan: StepPlan) -> None:
        self._edits.follow(plan, self._edits_of)

    def apply(self, logits: Tensor, plan: StepPlan) -> None:
        """Edit the logits [sampled rows, vocab_size] of a plan in place."""
        if not self._edits:
            return
        slots, positions = (column.tolist() for column in sampled_rows(plan))
        rows = [
            EditedRow(row, slot, position, self._edits[slot])
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True))
            if slot in self._edits
        ]
        limited = [row for row in rows if row.edits.allowed is not None]
        for some in in_pieces(limited, lambda row: len(row.allowed)):
            self._keep_allowed(logits, some)
        self._forbid_bad_words(logits, [row for row in rows if row.edits.bad_words])
        self._add_bias(logits, rows)
        penalised = [row for row in rows if row.edits.is_penalised]
        for some in in_pieces(penalised, lambda row: row.position):
            self._penalise(logits, some)

    def _edits_of(self, row: NewRow) -> RowEdits | None:
        params = row.params
        allowed = params.allowed_token_ids
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        edits = RowEdits(
            min_len=row.num_prompt_tokens + params.min_tokens,
            early_stops=sorted(row.stop_token_ids) if params.min_tokens else [],
            bias=dict(params.logit_bias or {}),
            allowed=None if allowed is None else self._upload(sorted(set(allowed))),
            bad_words=list(row.bad_words),
            is_penalised=penalties != (0.0, 0.0, 1.0),
        )
        is_needed = edits.early_stops or edits.bias or edits.bad_words or edits.is_penalised
        return edits if is_needed or allowed is not None else None

    def _keep_allowed(self, logits: Tensor, rows: list[EditedRow]) -> None:
        indices = self._upload([row.row for row in rows])
        counts = self._upload([len(row.allowed) for row in rows])
        total = sum(len(row.allowed) for row in rows)
        firsts = torch.repeat_interleave(indices * logits.shape[1], counts, output_size=total)
        offsets = torch.cat([row.allowed for row in rows]) + firsts
        kept = logits.view(-1)[offsets]
        logits.index_fill_(0, indices, -torch.inf)
        logits.view(-1)[offsets] = kept

    def _forbid_bad_words(self, logits: Tensor, rows: list[EditedRow]) -> None:
        """Forbid the last token of a word where the answer ends in all the others of it."""
        words = [(edited, word) for edited in rows for word in edited.edits.bad_words]
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
            first, edits = edited.row * logits.shape[1], edited.edits
            entries += [(first + token_id, bias) for token_id, bias in edits.bias.items()]
            if edited.position < edits.min_len:
                entries += [(first + token_id, -np.inf) for token_id in edits.early_stops]
        if entries:
            offsets = self._upload([offset for offset, _ in entries])
            values = np.array([value for _, value in entries], np.float32)
            bias = self.tables.device.upload(values).to(logits.dtype)
            logits.view(-1).index_add_(0, offsets, bias)

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


def in_pieces(
    rows: list[EditedRow], num_tokens: Callable[[EditedRow], int]
) -> Iterator[list[EditedRow]]:
    """Yield rows of similar length together, as many as MAX_TOKENS permits."""
    piece: list[EditedRow] = []
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
