"""Drafter: propose tokens for speculative decoding, as many as measurements say are worthwhile.

Drafts never change an output: the engine samples every position as plain decoding would, and keeps
the sampled tokens up to the first one that differs from its draft.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from nanovllm.engine.match_index import MatchIndex

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

MAX_STORED = 1 << 16  # tokens per generation of a store
MAX_STORES = 64  # cache salts with a store
MAX_PAUSE = 32  # steps between two attempts, while drafts are not worthwhile
RATE = 0.15  # weight of the newest measurement in a moving average


@dataclass(slots=True)
class DraftState:
    """What the drafter knows of a sequence."""

    index: MatchIndex = field(default_factory=MatchIndex)
    acceptance: float = 0.5  # moving average of whether a draft was accepted
    pause: int = 0  # steps to wait after the next draft that is not worthwhile
    num_waiting: int = 0  # steps left to wait
    match_class: int = 0


class OutputStore:
    """The newest outputs of one cache salt, in two generations: the older one is dropped whole."""

    def __init__(self) -> None:
        self.generations = [MatchIndex()]

    def add(self, token_ids: array[int]) -> None:
        if len(self.generations[0].tokens) > MAX_STORED:
            self.generations = [MatchIndex(), self.generations[0]]
        token_ids.append(-1)  # separates outputs
        self.generations[0].extend(token_ids)


class Drafter:
    """Proposes what followed the newest tokens when they occurred before.

    `ngram` searches the sequence itself; `suffix` also recent outputs with the same cache salt.
    """

    def __init__(self, method: Literal["ngram", "suffix"], num_speculative_tokens: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._has_store = method == "suffix"
        self._most = num_speculative_tokens
        self._states: dict[int, DraftState] = {}  # keyed by seq_id
        self._stores: OrderedDict[str | None, OutputStore] = OrderedDict()  # keyed by cache salt
        self._acceptance = [0.5] * 4  # by length of the match, as `DraftState.acceptance`
        self._seconds: dict[int, float] = {}  # of a decode step, by the bit length of its rows

    def propose(self, seq: Sequence, most: int, num_rows: int) -> list[int]:
        """Return up to `most` drafts for a sequence in a step of `num_rows` rows."""
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = DraftState()
        state.index.extend(seq.token_ids[len(state.index.tokens) :])
        if state.num_waiting:
            state.num_waiting -= 1
            return []
        indices = [state.index]
        if self._has_store and seq.request.cache_salt in self._stores:
            indices += self._stores[seq.request.cache_salt].generations
        context = seq.token_ids[-64:]
        found = [(index.find(context), index) for index in indices]
        matches = [(match, index) for match, index in found if match is not None]
        if not matches:
            return []
        match, index = max(matches, key=lambda pair: pair[0].length)
        state.match_class = min(match.length.bit_length() - 2, 3)
        count = self._worthwhile(state, min(most, self._most), num_rows)
        return follow(index, match.start, count, may_repeat=index is state.index)

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from the verification of a sequence's drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        state = self._states[seq.seq_id]
        outcomes = [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts)
        for outcome in outcomes:
            state.acceptance += RATE * (outcome - state.acceptance)
            average = self._acceptance[state.match_class]
            self._acceptance[state.match_class] += RATE * (outcome - average)
        if num_accepted == 0:
            state.pause = min(2 * state.pause + 1, MAX_PAUSE)
            state.num_waiting = state.pause
        else:
            state.pause = 0

    def measured(self, num_rows: int, seconds: float) -> None:
        """Learn how long a decode step takes."""
        size = num_rows.bit_length()
        old = self._seconds.get(size, seconds)
        self._seconds[size] = old + RATE * (min(seconds, 2 * old) - old)

    def finished(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)
        if self._has_store and len(seq.token_ids) > seq.num_prompt_tokens:
            salt = seq.request.cache_salt
            store = self._stores.setdefault(salt, OutputStore())
            self._stores.move_to_end(salt)
            store.add(seq.token_ids[seq.num_prompt_tokens :])
            if len(self._stores) > MAX_STORES:
                self._stores.popitem(last=False)

    def _worthwhile(self, state: DraftState, most: int, num_rows: int) -> int:
        """Return the number of drafts with the most tokens per second; 0 if none are worthwhile."""
        acceptance = (state.acceptance + self._acceptance[state.match_class]) / 2
        best, best_rate, expected, chance = 0, num_rows / self._cost(num_rows), float(num_rows), 1.0
        for count in range(1, most + 1):
            chance *= acceptance
            expected += chance
            rate = expected / self._cost(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0:
            state.pause = min(2 * state.pause + 1, MAX_PAUSE)
            state.num_waiting = state.pause
            return int(state.pause == MAX_PAUSE)  # try one now and then: it may have become better
        return best

    def _cost(self, num_rows: int) -> float:
        """Return the seconds of a step of this size, or of the nearest smaller one measured."""
        for size in range(num_rows.bit_length(), 0, -1):
            if size in self._seconds:
                return self._seconds[size]
        return 1.0


def follow(index: MatchIndex, start: int, count: int, *, may_repeat: bool) -> list[int]:
    """Return `count` tokens from `start` on; at the end of the sequence itself they repeat."""
    drafts = index.tokens[start : start + count].tolist()
    period = len(index.tokens) - start
    while may_repeat and len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts
