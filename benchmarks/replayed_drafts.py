"""A proposer that replays recorded outputs, and corrupts some of its drafts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.engine.drafter import Proposal
from nanovllm.engine.sequence import Sequence


@dataclass
class Replay:
    """Proposes what follows in a recorded sequence that begins with the same tokens."""

    recorded: Iterable[list[int]]  # prompt and output
    vocab_size: int
    corruption: float = 0.2  # probability for each draft
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        known = seq.token_ids.tolist()
        for tokens in self.recorded:
            if tokens[: len(known)] == known and len(tokens) > len(known):
                drafts = tokens[len(known) : len(known) + most]
                return Proposal([self._corrupted(draft) for draft in drafts], 0)
        return None

    def finished(self, seq: Sequence) -> None:
        pass

    def _corrupted(self, draft: int) -> int:
        is_kept = self.rng.random() >= self.corruption
        return draft if is_kept else self.rng.randrange(self.vocab_size)
