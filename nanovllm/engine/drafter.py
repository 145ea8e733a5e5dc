"""Drafter: how many tokens to propose for speculative decoding, by measured gain.

Drafts never change an output: the engine samples every position as plain decoding would, and keeps
the sampled tokens up to the first one that differs from its draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

NUM_CLASSES = 4  # of proposals, by how certain they are
MAX_PAUSE = 32  # steps between two attempts, while drafts are not worthwhile
RATE = 0.15  # weight of the newest measurement in a moving average


class Proposal(NamedTuple):
    """Tokens that may follow a sequence."""

    token_ids: list[int]
    certainty: int  # below NUM_CLASSES


class Proposer(Protocol):
    """Guesses how sequences continue. A sequence's known tokens are its `token_ids`."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Return up to `most` tokens that may follow, or None."""

    def finished(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; may be called for one that was never proposed for."""


@dataclass(slots=True)
class DraftState:
    """What the drafter has learned about a sequence."""

    acceptance: float = 0.5  # moving average of whether a draft was accepted
    certainty: int = 0  # of its newest proposal
    pause: int = 0  # length of its last pause, in steps
    num_paused: int = 0  # steps until the pause ends

    def wait(self) -> None:
        """Pause, twice as long as the last time."""
        self.pause = self.num_paused = min(2 * self.pause + 1, MAX_PAUSE)


class Drafter:
    """Drafts as many tokens as give the most tokens per second.

    The estimate combines the acceptance of earlier drafts, of the sequence and of all proposals of
    the same certainty, with the measured time of decode steps by their number of rows.
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int) -> None:
        self._proposer = proposer
        self._most = num_speculative_tokens
        self._states: dict[int, DraftState] = {}  # keyed by seq_id
        self._acceptance = [0.5] * NUM_CLASSES  # by certainty
        self._seconds: dict[int, float] = {}  # of a decode step, by the bit length of its rows
        self._measured: set[int] = set()  # the same sizes, once a step has run

    def is_promising(self, seq: Sequence) -> bool:
        """Whether to wait for a sequence's pending token, because drafts may follow it."""
        state = self._states.setdefault(seq.seq_id, DraftState())
        if state.num_paused:
            state.num_paused -= 1
            return False
        return self._proposer.propose(seq, 1) is not None

    def draft(self, seq: Sequence, most: int, num_rows: int) -> list[int]:
        """Return up to `most` drafts for a row of a step with `num_rows` rows."""
        state = self._states.setdefault(seq.seq_id, DraftState())
        if state.num_paused:
            state.num_paused -= 1
            return []
        proposal = self._proposer.propose(seq, min(most, self._most))
        if proposal is None:
            return []
        state.certainty = proposal.certainty
        return proposal.token_ids[: self._best_count(state, len(proposal.token_ids), num_rows)]

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn how many drafts of a sequence were accepted."""
        state = self._states[seq.seq_id]
        for outcome in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            state.acceptance += RATE * (outcome - state.acceptance)
            self._acceptance[state.certainty] += RATE * (
                outcome - self._acceptance[state.certainty]
            )
        if num_accepted:
            state.pause = 0
        else:
            state.wait()

    def measured(self, num_rows: int, seconds: float) -> None:
        """Learn how long a decode step takes."""
        size = num_rows.bit_length()
        if size not in self._measured:  # the first step of a size may capture a graph
            self._measured.add(size)
            return
        old = self._seconds.get(size, seconds)
        self._seconds[size] = old + RATE * (min(seconds, 2 * old) - old)

    def finished(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._states.pop(seq.seq_id, None)
        self._proposer.finished(seq)

    def _best_count(self, state: DraftState, most: int, num_rows: int) -> int:
        """Return the number of drafts with the highest expected rate; 0 if none is worthwhile."""
        acceptance = (state.acceptance + self._acceptance[state.certainty]) / 2
        best, best_rate = 0, num_rows / self._cost(num_rows)
        expected, chance = float(num_rows), 1.0  # tokens of the step
        for count in range(1, most + 1):
            chance *= acceptance
            expected += chance
            if count & (count + 1):  # only 1, 3, 7, 15 and 31, so that fewer graphs are captured
                continue
            rate = expected / self._cost(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0:
            state.wait()
            return int(state.pause == MAX_PAUSE)  # try one: acceptance may have risen
        return best

    def _cost(self, num_rows: int) -> float:
        """Return the seconds of a step of this size, or of the nearest smaller one measured."""
        for size in range(num_rows.bit_length(), 0, -1):
            if size in self._seconds:
                return self._seconds[size]
        return 1.0
