"""A proposer that replays recorded outputs, and corrupts some of its drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from nanovllm.engine.drafter import Proposal
from nanovllm.engine.sequence import Sequence


@dataclass
class Replay:
    """Proposes what follows in a recorded sequence that begins with the same tokens."""

    recorded: list[list[int]]  # prompt and output
    vocab_size: int
    corruption: float = 0.2  # probability for each draft
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _newest: dict[int, list[int]] = field(default_factory=dict)  # what matched, by seq_id

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        known = seq.token_ids.tolist()
        for tokens in (self._newest.get(seq.seq_id, []), *self.recorded):
            if tokens[: len(known)] == known and len(tokens) > len(known):
                self._newest[seq.seq_id] = tokens
                drafts = tokens[len(known) : len(known) + most]
                return Proposal([self._corrupted(draft) for draft in drafts], 0)
        return None

    def finished(self, seq: Sequence) -> None:
        self._newest.pop(seq.seq_id, None)

    def _corrupted(self, draft: int) -> int:
        is_kept = self.rng.random() >= self.corruption
        return draft if is_kept else self.rng.randrange(self.vocab_size)
