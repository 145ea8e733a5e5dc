"""Solutions of day 4.

PYTHONPATH=learn python learn/solutions/day4.py
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from common import Model, load_from_command_line
from day3_paged_cache import BlockManager, PagedCache, Sequence
from day4_continuous_batching import Engine, Row, Scheduler, timeline


# Exercise 1: new requests pay the price: their first token comes later.
class LatencyScheduler(Scheduler):
    """Runs at most `max_prefill_tokens` of prompts in a step that has decode rows."""

    def __init__(self, *args: Any, max_prefill_tokens: int = 4) -> None:
        super().__init__(*args)
        self.max_prefill_tokens = max_prefill_tokens

    def schedule(self) -> list[Row]:
        budget, rows = self.max_num_batched_tokens, []
        decoding = [seq for seq in self.running if len(seq.token_ids) - seq.num_computed == 1]
        prefilling = [seq for seq in self.running if seq not in decoding]
        for seq in decoding:
            budget -= self._add_row(rows, seq, budget)
        if rows:
            budget = min(budget, self.max_prefill_tokens)
        for seq in prefilling:
            budget -= self._add_row(rows, seq, budget)
        self._admit(rows, budget)
        return rows


# Exercise 2: yes, a sequence starves while others with a lower number keep arriving. A common
# remedy is aging: the number of a sequence shrinks while it waits.
@dataclass(eq=False)
class PrioritySequence(Sequence):
    priority: int = 0


class PriorityScheduler(Scheduler):
    """Admits the sequence with the lowest priority number first."""

    def _admit(self, rows: list[Row], budget: int) -> None:
        # Sorting keeps the order of equal elements.
        self.waiting = deque(sorted(self.waiting, key=lambda seq: seq.priority))
        super()._admit(rows, budget)


def main(model: Model, tokenizer: Any) -> None:
    """Show how a long prompt joins a decoding sequence, in large and in small chunks."""
    prompts = {"A": "One, two, three,", "B": "Q: Why is the sky blue?\nA: The sky is blue because"}
    for scheduler_class in (Scheduler, LatencyScheduler):
        scheduler = scheduler_class(BlockManager(32, 4), model.config.eos_ids, 4, 12)
        engine = Engine(model, PagedCache(model.config, 32, 4), scheduler)
        sequences = [Sequence(name, tokenizer.encode(text), 8) for name, text in prompts.items()]
        steps = engine.run(sequences)
        print(scheduler_class.__name__, *timeline(sequences, steps), sep="\n")

    scheduler = PriorityScheduler(BlockManager(32, 4), model.config.eos_ids, 1, 12)
    engine = Engine(model, PagedCache(model.config, 32, 4), scheduler)
    prompt_ids, priorities = tokenizer.encode(prompts["A"]), {"A": 1, "B": 0, "C": 1, "D": 0}
    sequences = [
        PrioritySequence(name, list(prompt_ids), 2, priority=priority)
        for name, priority in priorities.items()
    ]
    print(f"PriorityScheduler, one at a time, with the priorities {priorities}")
    print(*timeline(sequences, engine.run(sequences)), sep="\n")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
