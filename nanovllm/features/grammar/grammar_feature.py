"""GrammarFeature: limit the output of sequences to what their grammars allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.feature import Feature
from nanovllm.engine.grammar import Allocate, GrammarEngine, Matcher
from nanovllm.engine.step import Bitmasks

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.sequence import Sequence


class GrammarFeature(Feature):
    """Sends bitmasks for the rows with a grammar, once the tokens they depend on are known.

    `get_engine` always returns the same engine, and is first called for a request with a grammar.
    """

    def __init__(self, get_engine: Callable[[], GrammarEngine]) -> None:
        self._get_engine = get_engine
        self._matchers: dict[int, Matcher] = {}  # keyed by seq_id
        self._postponed: dict[int, Sequence] = {}  # those whose matchers are not ready

    def joins(self, seq: Sequence) -> bool:
        grammar, stops = seq.request.grammar, seq.request.stop_token_ids
        if grammar is None:
            return False
        matcher = self._matchers[seq.seq_id] = self._get_engine().matcher(grammar, stops)
        seq.stops = lambda token_id: token_id in stops or matcher.finishes(token_id)
        return True

    def is_ready(self, seq: Sequence) -> bool:
        if self._matchers[seq.seq_id].is_ready:
            return True
        self._postponed[seq.seq_id] = seq
        return False

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        for seq in list(self._postponed.values()):
            if self._matchers[seq.seq_id].is_ready:
                del self._postponed[seq.seq_id]
                scheduler.resume(seq)

    def planned(self, step: Step) -> None:
        if self._matchers and any(self._masked_rows(step)):
            step.get_bitmasks = self._bitmasks

    def ended(self, seq: Sequence) -> None:
        del self._matchers[seq.seq_id]
        self._postponed.pop(seq.seq_id, None)

    def num_allowed(self, seq: Sequence, drafts: list[int]) -> int:
        """Return how many leading draft tokens may follow the tokens of a sequence."""
        matcher = self._matchers.get(seq.seq_id)
        return len(drafts) if matcher is None else matcher.num_allowed(drafts)

    def _bitmasks(self, scheduler: Scheduler, step: Step, allocate: Allocate) -> Bitmasks:
        """Return the bitmasks of a step; retract the rows whose bitmasks take too long."""
        rows = list(self._masked_rows(step))
        slots = np.array([slot for slot, _, _ in rows], np.int32)
        matchers = [(matcher, seq.drafts) for _, seq, matcher in rows]
        words, late = self._get_engine().masks(matchers, allocate)
        for index in late:
            _, seq, _ = rows[index]
            scheduler.retract(seq, step)
            self._postponed[seq.seq_id] = seq
        return Bitmasks(slots, words)

    def _masked_rows(self, step: Step) -> Iterator[tuple[int, Sequence, Matcher]]:
        for slot, seq, count in zip(step.slots, step.rows, step.num_logits, strict=True):
            if count and (matcher := self._matchers.get(seq.seq_id)) is not None:
                yield slot, seq, matcher
