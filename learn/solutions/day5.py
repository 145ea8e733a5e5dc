"""Solutions of day 5.

PYTHONPATH=learn python learn/solutions/day5.py
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import day5_prefix_cache as day5
from common import Model, load_from_command_line
from day3_paged_cache import PagedCache, Sequence
from day4_continuous_batching import Engine, Row


# Exercise 1: the chain of hashes begins with the salt, so the hashes of two users never match.
@dataclass(eq=False)
class SaltedSequence(Sequence):
    salt: str = ""


class SaltedBlockManager(day5.BlockManager):
    def block_hashes(self, seq: SaltedSequence, num_blocks: int) -> Iterator[bytes]:
        parent = hashlib.sha256(seq.salt.encode()).digest()  # was: b""
        for start in range(0, num_blocks * self.block_size, self.block_size):
            tokens = array("i", seq.token_ids[start : start + self.block_size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            yield parent


# Exercise 2: `batched_attend` of day 4 handles the rows of a step in order, and each row stores its
# keys before it attends. So in every layer, the blocks of an earlier row are filled when a later
# row reads them. In the engine, one call writes the keys and values of all rows of a layer, and the
# next call attends: all writes of a layer come before its reads, so the order does not matter.
class EarlyScheduler(day5.Scheduler):
    """Registers blocks when it plans to fill them."""

    def _add_row(self, rows: list[Row], seq: Sequence, budget: int) -> int:
        num_tokens = super()._add_row(rows, seq, budget)
        self.blocks.register(seq)
        return num_tokens


def main(model: Model, tokenizer: Any) -> None:
    """Run one prompt for two users, then twice in one step."""
    blocks, cache = SaltedBlockManager(32, 4), PagedCache(model.config, 32, 4)
    scheduler = day5.Scheduler(blocks, model.config.eos_ids, 1, 64)
    names, prompt_ids = ("Ann", "Bob", "Ann again"), tokenizer.encode(day5.PREFIX)
    Engine(model, cache, scheduler).run(
        [SaltedSequence(name, list(prompt_ids), 1, salt=name[:3]) for name in names]
    )
    print(*(event for event in scheduler.events if "enters" in event), sep="\n")

    for scheduler_class in (day5.Scheduler, EarlyScheduler):
        blocks, cache = day5.BlockManager(32, 4), PagedCache(model.config, 32, 4)
        engine = Engine(model, cache, scheduler_class(blocks, model.config.eos_ids, 4, 64))
        steps = engine.run([Sequence(name, list(prompt_ids), 1) for name in "AB"])
        print(f"{scheduler_class.__name__}: {day5.num_tokens_run(steps)} tokens run")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
