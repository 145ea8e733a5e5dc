"""Drafter: choose the number of draft tokens for speculative decoding from measured throughput.

In float32, draft tokens never change the output: each position is sampled exactly as it would be
without them, and the worker rejects the tokens after the first one that differs from its draft
token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.engine.feature import Feature
from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation.ngram_proposer import NgramProposer
from nanovllm.features.speculation.proposer import NUM_CLASSES, ModelProposer, Proposer

if TYPE_CHECKING:
    from nanovllm.config.speculative_config import SpeculativeConfig
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.step import StepResult

NumAllowed = Callable[[Sequence, list[int]], int]

MAX_PAUSE = 63  # maximum pause of a sequence whose drafts do not pay off, in steps
FIRST_ACCEPTANCE = 0.7  # acceptance rate assumed before any measurement
TRIAL, MIN_PHASE, MAX_PHASE = 12, 32, 512  # phase lengths of a Trial, in steps
MIN_SPEEDUP = 1.05  # with less, a Trial turns drafts off: the gain may be noise
NUM_CHOICES = 64  # one choice in this many tries the maximum number of draft tokens
RATE = 0.15  # weight of the latest measurement in a moving average


@dataclass(slots=True)
class DraftState:
    """What the drafter has learned about a sequence."""

    # Acceptance rate of its draft tokens, a moving average; None before any was verified.
    acceptance: float | None = None
    certainty: int = 0  # of the latest proposal
    pause: int = 0  # length of the latest pause, in steps
    num_paused: int = 0  # steps until the pause ends

    def wait(self) -> None:
        """Start a pause, about twice as long as the previous one."""
        self.pause = self.num_paused = min(2 * self.pause + 1, MAX_PAUSE)


def create_drafter(config: SpeculativeConfig, num_allowed: NumAllowed | None) -> Drafter:
    """Create the drafter for a `speculative_config`; `num_allowed` applies grammars to drafts."""
    proposer: Proposer = ModelProposer()
    if config.method != "draft_model":
        proposer = NgramProposer(has_store=config.method == "suffix")
    drafter = Drafter(proposer, config.num_speculative_tokens)
    drafter.num_allowed = num_allowed or drafter.num_allowed
    return drafter


class Drafter(Feature):
    """Chooses the number of draft tokens that maximizes throughput.

    Throughput is estimated from two acceptance rates, that of the sequence and that of all
    proposals with the same `certainty`, and from measured step times by number of rows.
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int) -> None:
        self.proposer = proposer
        # Returns how many leading draft tokens a sequence's grammar allows.
        self.num_allowed: NumAllowed = lambda seq, drafts: len(drafts)
        self._most = num_speculative_tokens
        self._states: dict[int, DraftState] = {}  # keyed by seq_id
        self._acceptance = [FIRST_ACCEPTANCE] * NUM_CLASSES  # indexed by certainty
        self._num_choices = 0
        self._pause = 0  # `DraftState.pause` of the latest choice, inherited by new sequences
        self._costs = StepCosts()
        # Compare steps with and without drafts, keyed by the bit length of the number of sequences.
        self._trials: defaultdict[int, Trial] = defaultdict(Trial)
        self._is_on = True
        self._newest: list[int] = []  # `num_logits` of the latest step, while it is in flight
        # Whether more than an eighth of its rows have draft tokens. Then the other rows wait, too:
        # a step with only them would take about as long as one with all rows.
        self._has_many_drafted = False
        self._num_rows = 0  # rows of the step being planned, including its draft tokens so far
        self._num_tokens = 0.0  # expected number of output tokens of that step
        self._room = 0  # number of further draft tokens that fit into that step

    def joins(self, seq: Sequence) -> bool:
        return seq.request.pooling is None and not seq.is_serial

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        self._blocks = scheduler.blocks
        num_running = len(scheduler.running)
        num_unused = max(scheduler.max_num_seqs - num_running - len(scheduler.waiting), 0)
        self.begin(num_running, num_unused)

    def row_end(self, seq: Sequence, end: int, limit: int) -> int:
        if self.must_wait(seq):
            return seq.num_computed
        if end < seq.num_tokens:
            return end
        seq.drafts = self.draft(seq, limit - end)
        return end + len(seq.drafts)

    def planned(self, step: Step) -> None:
        self._newest = step.num_logits

    def committed(self, step: Step, result: StepResult) -> None:
        if step.num_logits is self._newest:
            self._newest = []
        if result.num_valid is not None:
            columns = zip(step.rows, step.num_logits, result.num_valid.tolist(), strict=True)
            for seq, count, valid in columns:
                if count > 1 and seq.finish_reason is None and seq not in step.dropped:
                    self.verified(seq, count - 1, valid - 1)
        if not step.plan.num_prefill_tokens:
            # The duration includes idle time of the device, because drafting delays the plan.
            num_tokens = step.num_decode_tokens - step.draft_counts.num_rejected_tokens
            self.measured(len(step.rows), step.num_decode_tokens, num_tokens, step.seconds)

    def begin(self, num_rows: int, num_unused: int) -> None:
        """Start planning a step with `num_rows` running sequences; `num_unused` slots stay free."""
        num_drafted = sum(count > 1 for count in self._newest)
        self._has_many_drafted = 8 * num_drafted > len(self._newest)
        self._num_rows, self._num_tokens = num_rows, float(num_rows)
        self._room = num_unused + self._most
        trial = self._trials[num_rows.bit_length()]
        self._is_on = self._costs.is_known(num_rows) and (num_rows <= 1 or trial.is_on)

    def must_wait(self, seq: Sequence) -> bool:
        """Whether a sequence must wait until the host knows its pending token."""
        if not seq.num_pending:
            return False
        if seq.drafts or self._has_many_drafted:
            return True
        return seq.num_computed == seq.num_tokens - 1 and self.is_promising(seq)

    def is_promising(self, seq: Sequence) -> bool:
        """Return whether to wait for a sequence's pending token, because drafts may follow it.

        If the sequence is paused, count one step of its pause.
        """
        if not self._is_on:
            return False
        state = self._state(seq)
        if state.num_paused:
            state.num_paused -= 1
            return False
        return self.proposer.propose(seq, 1) is not None

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Return up to `most` draft tokens for a row of the step being planned.

        Only decode rows whose tokens are all known on the host get any.
        """
        num_free = seq.capacity - seq.num_tokens + self._blocks.num_free_tokens
        most = min(most, seq.max_len - seq.num_tokens - 1, num_free)
        if seq.num_pending or seq.num_computed < seq.num_tokens - 1 or most < 1:
            return []
        return self.choose(seq, most)

    def choose(self, seq: Sequence, most: int) -> list[int]:
        """Return the draft tokens that are expected to pay off, at most `most`."""
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
        token_ids = token_ids[: self.num_allowed(seq, token_ids)]
        if not token_ids:
            state.wait()
            return []
        count = self._best_count(state, len(token_ids))
        self._room -= count
        return token_ids[:count]

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Update the acceptance rates after draft tokens of a sequence were verified."""
        state = self._state(seq)
        if state.acceptance is None:
            state.acceptance = self._acceptance[state.certainty]
        for outcome in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            state.acceptance += RATE * (outcome - state.acceptance)
            self._acceptance[state.certainty] += RATE * (
                outcome - self._acceptance[state.certainty]
            )

    def measured(self, num_seqs: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Record the duration and the output tokens of a decode step.

        `num_rows` counts the draft tokens, too.
        """
        self._costs.add(num_rows, seconds)
        if num_seqs > 1:
            self._trials[num_seqs.bit_length()].add(num_tokens, seconds)

    def ended(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)
        self.proposer.finished(seq)

    def _state(self, seq: Sequence) -> DraftState:
        if seq.seq_id not in self._states:
            self._states[seq.seq_id] = DraftState(pause=self._pause)
        return self._states[seq.seq_id]

    def _best_count(self, state: DraftState, most: int) -> int:
        """Return the number of draft tokens with the highest expected throughput.

        If none pays off, return 1 and let the sequence pause after this step.
        """
        acceptance = self._acceptance[state.certainty]
        if state.acceptance is not None:
            acceptance = (acceptance + state.acceptance) / 2
        best, best_rate = 0, self._num_tokens / self._costs.of(self._num_rows)
        expected, chance, best_tokens = self._num_tokens, 1.0, self._num_tokens
        for count in range(1, most + 1):
            chance *= acceptance
            expected += chance
            # Consider only 1, 3, 7, 15, 31 and the maximum, so that fewer graphs are captured.
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
            return 1  # find out whether acceptance has risen
        self._pause = state.pause = 0
        self._num_rows, self._num_tokens = self._num_rows + best, best_tokens
        return best


class StepCosts:
    """Measured durations of decode steps, by number of rows.

    Steps with similar numbers of rows are averaged; other durations are interpolated. A step larger
    than any measured one is assumed to take no longer than the largest, so that it is tried.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # size class -> average rows, seconds
        self._seen: set[int] = set()  # size classes

    def add(self, num_rows: int, seconds: float) -> None:
        size = (num_rows**2).bit_length()  # size class: 8 to 11 rows, 12 to 15, 16 to 22
        if size not in self._seen:  # the first step of a class may capture a graph
            self._seen.add(size)
            return
        rows, old = self._points.get(size, (num_rows, seconds))
        # A single step may take much longer: the engine was paused, or captured a graph.
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
    """Alternates between phases with and without drafts, and compares their tokens per second.

    After a short phase of each, the faster mode gets a long phase; then the other is tried again.
    """

    def __init__(self) -> None:
        self.is_on = True
        # is_on -> tokens per second; the rate with drafts is divided by MIN_SPEEDUP.
        self._rates: dict[bool, float] = {}
        self._long = MIN_PHASE  # length of the next long phase, in steps
        self._begin(TRIAL)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record a step; if it is the last one of its phase, begin the next phase."""
        self._steps.append((seconds, num_tokens))
        if len(self._steps) < self._length:
            return
        steps = self._steps[TRIAL // 4 :]  # the first may be from the previous phase
        longest = 3 * min(steps)[0]  # longer steps, such as those that capture graphs, are outliers
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
