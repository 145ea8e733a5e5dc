"""Drafter: how many tokens to propose for speculative decoding, by measured gain.

Drafts never change an output: the engine samples every position as plain decoding would, and keeps
the sampled tokens up to the first one that differs from its draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nanovllm.engine.request import DraftCounts
from nanovllm.engine.sequence import NO_SLOT, Sequence
from nanovllm.sampling_params import NO_TOKEN

if TYPE_CHECKING:
    from nanovllm.engine.block_manager import BlockManager

NUM_CLASSES = 4  # of proposals, by how certain they are
MAX_PAUSE = 63  # maximum steps between two attempts, while drafts are not worthwhile
FIRST_ACCEPTANCE = 0.7
TRIAL, MIN_PHASE, MAX_PHASE = 12, 32, 512  # steps of the phases of a Trial
MIN_SPEEDUP = 1.05  # with less, a Trial turns drafts off; smaller gains may be noise
NUM_CHOICES = 64  # after so many choices, the maximum number of drafts is tried
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


class ModelProposer:
    """Leaves the drafts to the worker's draft model; the host knows only how many there are."""

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Return placeholders; None for a grammar, whose bitmasks depend on the drafts."""
        return None if seq.matcher is not None else Proposal([NO_TOKEN] * most, 0)

    def finished(self, seq: Sequence) -> None:
        """Forget nothing: the worker forgets released slots."""


@dataclass(slots=True)
class DraftState:
    """What the drafter has learned about a sequence."""

    # Moving average of whether a draft was accepted; None before the first one.
    acceptance: float | None = None
    certainty: int = 0  # of its newest proposal
    pause: int = 0  # length of its last pause, in steps
    num_paused: int = 0  # steps until the pause ends

    def wait(self) -> None:
        """Pause, twice as long as the last time."""
        self.pause = self.num_paused = min(2 * self.pause + 1, MAX_PAUSE)


def create_drafter(method: str, num_speculative_tokens: int) -> Drafter:
    """Create the drafter of a method of `speculative_config`."""
    from nanovllm.engine.ngram_proposer import NgramProposer  # imports this file

    proposer: Proposer = ModelProposer()
    if method != "draft_model":
        proposer = NgramProposer(has_store=method == "suffix")
    return Drafter(proposer, num_speculative_tokens)


class Drafter:
    """Drafts as many tokens as give the most tokens per second.

    The estimate combines the acceptance of earlier drafts, of the sequence and of all proposals of
    the same certainty, with the measured time of decode steps by their number of rows.
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int) -> None:
        self.proposer = proposer
        self.counts = DraftCounts()
        self._most = num_speculative_tokens
        self._states: dict[int, DraftState] = {}  # keyed by seq_id
        self._acceptance = [FIRST_ACCEPTANCE] * NUM_CLASSES  # by certainty
        self._num_choices = 0
        self._pause = 0  # of the last sequence that paused; the next one begins with it
        self._costs = StepCosts()
        # Whether drafts pay off at all, by the bit length of the number of sequences.
        self._trials: defaultdict[int, Trial] = defaultdict(Trial)
        self._is_on = True
        # Whether many rows of the newest plan in flight have drafts. Then the others wait, too: a
        # step without the drafted rows would take about as long as one with all rows.
        self._has_many_drafted = False
        self._num_rows = 0  # of the step that is being planned, with the drafts so far
        self._num_tokens = 0.0  # that this step is expected to add to outputs
        self._room = 0  # rows for further drafts

    def begin_step(self, num_rows: int, num_unused: int, newest: list[Sequence]) -> None:
        """Begin to plan a step for `num_rows` sequences; `num_unused` more would fit.

        `newest` are the rows of the newest plan in flight.
        """
        self._has_many_drafted = 8 * sum(bool(seq.drafts) for seq in newest) > len(newest)
        self._num_rows, self._num_tokens = num_rows, float(num_rows)
        self._room = num_unused + self._most
        trial = self._trials[num_rows.bit_length()]
        self._is_on = self._costs.is_known(num_rows) and (num_rows <= 1 or trial.is_on)

    def must_wait(self, seq: Sequence) -> bool:
        """Whether a sequence waits until the host knows its pending token."""
        if seq.drafts or self._has_many_drafted:
            return True
        return seq.num_computed == seq.num_tokens - 1 and self.is_promising(seq)

    def is_promising(self, seq: Sequence) -> bool:
        """Whether to wait for a sequence's pending token, because drafts may follow it."""
        if not self._is_on:
            return False
        state = self._state(seq)
        if state.num_paused:
            state.num_paused -= 1
            return False
        return self.proposer.propose(seq, 1) is not None

    def draft(self, seq: Sequence, most: int, blocks: BlockManager) -> list[int]:
        """Return up to `most` drafts for a row of the step that is being planned.

        Only decode rows get drafts: tokens that may follow the newest one.
        """
        num_free = seq.capacity - seq.num_tokens + blocks.num_free * blocks.block_size
        most = min(most, seq.max_len - seq.num_tokens - 1, num_free)
        if seq.num_pending or seq.is_serial or seq.num_computed < seq.num_tokens - 1 or most < 1:
            return []
        return self.choose(seq, most)

    def choose(self, seq: Sequence, most: int) -> list[int]:
        """Return the drafts that are worthwhile, at most `most`."""
        if not self._is_on:
            return []
        state = self._state(seq)
        if state.num_paused:
            state.num_paused -= 1
            return []
        most = min(most, self._most, self._room)
        proposal = self.proposer.propose(seq, most) if most > 0 else None
        if proposal is None:
            return []
        state.certainty, token_ids = proposal.certainty, proposal.token_ids
        if seq.matcher is not None:
            token_ids = token_ids[: seq.matcher.num_allowed(token_ids)]
        if not token_ids:
            state.wait()
            return []
        count = self._best_count(state, len(token_ids))
        self._room -= count
        return token_ids[:count]

    def verify(
        self, seq: Sequence, token_ids: list[int], append: Callable[[Sequence, int], None]
    ) -> None:
        """Append the sampled tokens up to the first that differs from its draft."""
        drafts, seq.drafts = seq.drafts, []
        count = num_accepted(drafts, token_ids)
        self.verified(seq, len(drafts), count)
        seq.num_tokens += count
        if seq.slot != NO_SLOT:  # not preempted in the meantime
            seq.num_computed += count
            seq.has_rejected = True
        num_new = 0
        for token_id in token_ids[: count + 1]:
            append(seq, token_id)
            num_new += 1
            if seq.finish_reason is not None:
                break
        for counts in (self.counts, seq.draft_counts):
            counts.add(len(drafts), num_new - 1)

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn how many drafts of a sequence were accepted."""
        state = self._state(seq)
        if state.acceptance is None:
            state.acceptance = self._acceptance[state.certainty]
        for outcome in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            state.acceptance += RATE * (outcome - state.acceptance)
            self._acceptance[state.certainty] += RATE * (
                outcome - self._acceptance[state.certainty]
            )

    def measured(self, num_seqs: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn how long a decode step took, and how many tokens it added to outputs."""
        self._costs.add(num_rows, seconds)
        if num_seqs > 1:
            self._trials[num_seqs.bit_length()].add(num_tokens, seconds)

    def finished(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._states.pop(seq.seq_id, None)
        self.proposer.finished(seq)

    def _state(self, seq: Sequence) -> DraftState:
        if seq.seq_id not in self._states:
            self._states[seq.seq_id] = DraftState(pause=self._pause)
        return self._states[seq.seq_id]

    def _best_count(self, state: DraftState, most: int) -> int:
        """Return the number of drafts with the highest expected rate; 0 if none is worthwhile."""
        acceptance = self._acceptance[state.certainty]
        if state.acceptance is not None:
            acceptance = (acceptance + state.acceptance) / 2
        best, best_rate = 0, self._num_tokens / self._costs.of(self._num_rows)
        expected, chance, best_tokens = self._num_tokens, 1.0, self._num_tokens
        for count in range(1, most + 1):
            chance *= acceptance
            expected += chance
            # Only 1, 3, 7, 15, 31 and the maximum, so that fewer graphs are captured.
            if count & (count + 1) and count < most:
                continue
            rate = expected / self._costs.of(self._num_rows + count)
            if rate > best_rate:
                best, best_rate, best_tokens = count, rate, expected
        self._num_choices += 1
        if 0 < best < most and self._num_choices % NUM_CHOICES == 0:
            return most  # the cost of larger steps may have been overestimated
        if best == 0:
            state.wait()
            self._pause = state.pause
            return 1  # acceptance may have risen
        self._pause = state.pause = 0
        self._num_rows, self._num_tokens = self._num_rows + best, best_tokens
        return best


def num_accepted(drafts: list[int], token_ids: list[int]) -> int:
    """Return how many drafts equal the tokens sampled in their place, up to the first mismatch."""
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


class StepCosts:
    """The measured seconds of decode steps by their number of rows.

    Steps with similar numbers of rows are averaged, and the cost of other numbers is interpolated.
    A step larger than any measured one counts as cheap, so it is tried.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # size -> (rows, seconds)
        self._seen: set[int] = set()  # sizes

    def add(self, num_rows: int, seconds: float) -> None:
        size = (num_rows**2).bit_length()  # half an octave: 8 to 11 rows, 12 to 15, 16 to 22
        if size not in self._seen:  # the first step of a size may capture a graph
            self._seen.add(size)
            return
        rows, old = self._points.get(size, (num_rows, seconds))
        # A step may last longer by exception: the engine was paused, or captured a graph.
        rate = RATE if seconds > old else 2 * RATE
        seconds = min(seconds, 2 * old)
        self._points[size] = rows + RATE * (num_rows - rows), old + rate * (seconds - old)

    def is_known(self, num_rows: int) -> bool:
        """Whether steps with about as many rows have been measured."""
        return (num_rows**2).bit_length() in self._points

    def of(self, num_rows: int) -> float:
        below = above = None
        for point in self._points.values():
            if point[0] <= num_rows and (below is None or point > below):
                below = point
            elif point[0] > num_rows and (above is None or point < above):
                above = point
        if below is None or above is None:
            return (below or above or (1, 1.0))[1]
        (first, low), (last, high) = below, above
        return low + (high - low) * (num_rows - first) / (last - first)


class Trial:
    """Compares the tokens per second with and without drafts, in phases of several steps.

    After a trial of both, the faster way has a long phase, and then the other is tried again.
    """

    def __init__(self) -> None:
        self.is_on = True
        # Tokens per second. The rate with drafts is divided by MIN_SPEEDUP.
        self._rates: dict[bool, float] = {}
        self._long = MIN_PHASE  # steps of the next long phase
        self._begin(TRIAL)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step; change to the other way at the end of a phase."""
        self._steps.append((seconds, num_tokens))
        if len(self._steps) < self._length:
            return
        steps = self._steps[TRIAL // 4 :]  # the first ones may have been planned in the last phase
        longest = 3 * min(steps)[0]  # longer steps are exceptions: they captured a graph
        steps = [step for step in steps if step[0] <= longest]
        total = sum(step[0] for step in steps)
        rate = sum(step[1] for step in steps) / max(total, 1e-9)
        self._rates[self.is_on] = rate / MIN_SPEEDUP if self.is_on else rate
        other = self._rates.get(not self.is_on)
        if other is None or self._length != TRIAL:
            self.is_on = not self.is_on
            self._begin(TRIAL)
        elif self._rates[self.is_on] > other:
            self._long = MIN_PHASE
            self._begin(self._long)
        else:
            self._long = min(2 * self._long, MAX_PHASE)
            self.is_on = not self.is_on
            self._begin(self._long)

    def _begin(self, num_steps: int) -> None:
        self._length = num_steps
        self._steps: list[tuple[float, int]] = []  # (seconds, tokens)
