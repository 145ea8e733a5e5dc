"""Replace the drafter of an engine; replay recorded outputs as drafts, some of them corrupted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.grammar.grammar_feature import GrammarFeature
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.proposer import Proposal

NUM_COMPARED = 4  # last tokens, which must match those of a recorded sequence


def set_drafter(scheduler: Scheduler, drafter: Drafter | None) -> None:
    """Use a drafter for the sequences that are added from now on; None: no drafts."""
    others = tuple(each for each in scheduler.features if not isinstance(each, Drafter))
    for each in others:
        if isinstance(each, GrammarFeature) and drafter is not None:
            drafter.num_allowed = each.num_allowed
    scheduler.features = others if drafter is None else (*others, drafter)


@dataclass
class Replay:
    """Proposes the next tokens of a recorded sequence with the same prompt."""

    recorded: list[list[int]]  # prompt and output
    vocab_size: int
    corruption: float = 0.2  # probability of replacing a draft token with a random one
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _candidates: dict[int, list[list[int]]] = field(default_factory=dict)  # keyed by seq_id

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        known = seq.token_ids
        if seq.seq_id not in self._candidates:
            prompt = known[: seq.num_prompt_tokens].tolist()
            self._candidates[seq.seq_id] = [
                each for each in self.recorded if each[: len(prompt)] == prompt
            ]
        candidates, newest = self._candidates[seq.seq_id], known[-NUM_COMPARED:].tolist()
        exact = [each for each in candidates if each[: len(known)][-NUM_COMPARED:] == newest]
        # If rounding on a GPU changed a token, the next ones may still follow the recording.
        [tokens] = (exact or candidates)[:1] or [[]]
        drafts = tokens[len(known) : len(known) + most]
        return Proposal([self._corrupted(draft) for draft in drafts], 0) if drafts else None

    def finished(self, seq: Sequence) -> None:
        self._candidates.pop(seq.seq_id, None)

    def _corrupted(self, draft: int) -> int:
        is_kept = self.rng.random() >= self.corruption
        return draft if is_kept else self.rng.randrange(self.vocab_size)
