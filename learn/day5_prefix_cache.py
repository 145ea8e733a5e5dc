"""Day 5: prefix caching by hash, and preemption.

Many prompts begin alike: the same system prompt, the same document, the same conversation so far.
Their first blocks hold the same keys and values, so we compute these once. Every full block gets a
hash of all tokens up to its end, and a new sequence looks up the blocks that it would fill.

Day 4 reserved blocks for the longest possible output. Today a sequence takes a block when it needs
one. If none is free, the last sequence to start gives its blocks back and waits. It keeps its
tokens, and later most of its keys and values are still in the cache.

From day 4: the engine's loop, the batch, and a scheduler that still only counts.

    python learn/day5_prefix_cache.py
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import day3_paged_cache as day3
import day4_continuous_batching as day4
from common import Model, Table, load_from_command_line, print_table, show
from day3_paged_cache import PagedCache, Sequence
from day4_continuous_batching import Engine, Row

BLOCK_SIZE = 4
NUM_BLOCKS = 11
LARGE_POOL = 21  # blocks that day 4 needs for the same requests
MAX_NUM_SEQS = 3
MAX_NUM_BATCHED_TOKENS = 12
PREFIX = "Capitals: France - Paris, Italy - Rome, Spain - Madrid,"
REQUESTS = {  # name: (prompt, how many tokens to generate)
    "A": (f"{PREFIX} Germany -", 8),
    "B": (f"{PREFIX} Japan -", 10),
    "C": (f"{PREFIX} Egypt -", 10),
    "D": (f"{PREFIX} Germany -", 4),  # A's prompt again
}


class BlockManager:
    """Day 3's manager, but sequences can share a block, and a free block keeps its content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # how many sequences hold each block
        self.free_ids = OrderedDict.fromkeys(range(num_blocks))  # reused from the front
        self.hashes = [b""] * num_blocks  # b"": the block is not full yet
        self.cached: dict[bytes, int] = {}  # hash -> block id

    def block_hashes(self, seq: Sequence, num_blocks: int) -> Iterator[bytes]:
        """Yield a hash for each of the first blocks of `seq`.

        Keys and values depend on all tokens before them. So each hash includes the one before it:
        the same four tokens after a different beginning make a different block.
        """
        parent = b""
        for start in range(0, num_blocks * self.block_size, self.block_size):
            tokens = array("i", seq.token_ids[start : start + self.block_size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            yield parent

    def admit(self, seq: Sequence) -> bool:
        """Give `seq` its cached prefix, and new blocks for the rest; False if too few are free."""
        # At least one token is left to run, because its scores choose the next token.
        num_blocks = (len(seq.token_ids) - 1) // self.block_size
        for block_hash in self.block_hashes(seq, num_blocks):
            if block_hash not in self.cached:
                break
            block_id = self.cached[block_hash]
            self.free_ids.pop(block_id, None)
            self.ref_counts[block_id] += 1
            seq.block_table.append(block_id)
        seq.num_computed = len(seq.block_table) * self.block_size  # a hit is work already done
        if self.allocate(seq, len(seq.token_ids)):
            return True
        self.release(seq)
        return False

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` enough blocks for `num_tokens`; return False if too few are free."""
        num_new = -(-num_tokens // self.block_size) - len(seq.block_table)
        if num_new > len(self.free_ids):
            return False
        for _ in range(num_new):
            block_id, _ = self.free_ids.popitem(last=False)  # the least recently used one
            if self.is_cached(block_id):
                del self.cached[self.hashes[block_id]]  # its content is lost only now
            self.hashes[block_id] = b""
            self.ref_counts[block_id] = 1
            seq.block_table.append(block_id)
        return True

    def register(self, seq: Sequence) -> None:
        """Put the full blocks of `seq` into the cache; their tokens have run."""
        hashes = self.block_hashes(seq, seq.num_computed // self.block_size)
        for block_id, block_hash in zip(seq.block_table, hashes, strict=False):  # the full ones
            self.hashes[block_id] = block_hash
            self.cached.setdefault(block_hash, block_id)  # another block may hold the same tokens

    def release(self, seq: Sequence) -> None:
        """Give back the blocks of `seq`. Those that no other sequence holds become free."""
        # Start at the end: a prefix is useful without its last block, but not without its first.
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_ids[block_id] = None
                # Uncached blocks are reused first; of the cached ones, those released first.
                self.free_ids.move_to_end(block_id, last=self.is_cached(block_id))
        seq.block_table = []
        seq.num_computed = 0

    def is_cached(self, block_id: int) -> bool:
        """Whether a new sequence can find the block by its hash."""
        return self.cached.get(self.hashes[block_id]) == block_id


class Scheduler(day4.Scheduler):
    """Day 4's scheduler, but sequences share blocks, take them when needed, and may lose them."""

    blocks: BlockManager

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[str] = []  # what happened, for the table

    def schedule(self) -> list[Row]:
        """Plan one step: first the running sequences that get blocks, then the waiting ones."""
        budget, rows = self.max_num_batched_tokens, []
        for seq in list(self.running):
            if seq in self.running and self._make_room(seq):
                budget -= self._add_row(rows, seq, budget)
        self._admit(rows, budget)
        return rows

    def _make_room(self, seq: Sequence) -> bool:
        """Allocate what `seq` needs now, preempting others if necessary; False if it must wait."""
        while not self.blocks.allocate(seq, len(seq.token_ids)):
            victim = self.running.pop()  # the last one, so that the first always makes progress
            self.blocks.release(victim)
            self.waiting.appendleft(victim)  # with all of its tokens, to run again
            self.events.append(f"{victim.name} is preempted")
            if victim is seq:
                return False
        return True

    def _admit(self, rows: list[Row], budget: int) -> None:
        """As on day 4, but a sequence only needs blocks for the tokens that it has now."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.blocks.admit(seq):
                break
            num_cached, num_tokens = seq.num_computed, len(seq.token_ids)
            self.events.append(f"{seq.name} enters, {num_cached} of {num_tokens} tokens cached")
            self.running.append(self.waiting.popleft())
            budget -= self._add_row(rows, seq, budget)

    def commit(self, rows: list[Row], next_ids: list[int]) -> None:
        """Register the blocks that the step has filled, then append its tokens as on day 4."""
        for row in rows:
            self.blocks.register(row.seq)
        super().commit(rows, next_ids)
        self.events += [f"{row.seq.name} ends" for row in rows if row.seq not in self.running]


def picture(blocks: BlockManager, running: list[Sequence]) -> str:
    """Draw one character per block: the sequence that holds it, or how many share it."""
    cells = ["-" if blocks.is_cached(i) else "." for i in range(len(blocks.ref_counts))]
    for seq in running:
        for block_id in seq.block_table:
            count = blocks.ref_counts[block_id]
            cells[block_id] = seq.name if count == 1 else str(count)
    return "".join(cells)


def new_sequences(tokenizer: Any) -> list[Sequence]:
    requests = REQUESTS.items()
    return [Sequence(name, tokenizer.encode(text), count) for name, (text, count) in requests]


def num_tokens_run(steps: list[list[Row]]) -> int:
    return sum(row.num_tokens for rows in steps for row in rows)


def main(model: Model, tokenizer: Any) -> None:
    print(
        f"{len(REQUESTS)} prompts begin with {PREFIX!r}; the pool has {NUM_BLOCKS} blocks of "
        f"{BLOCK_SIZE} tokens.\n'A' is a block of sequence A, '2' a block that two share, '-' a "
        "free block that is still cached, '.' an empty one. The pool is drawn after the step."
    )
    limits = model.config.eos_ids, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS
    blocks, sequences = BlockManager(NUM_BLOCKS, BLOCK_SIZE), new_sequences(tokenizer)
    scheduler = Scheduler(blocks, *limits)
    engine = Engine(model, PagedCache(model.config, NUM_BLOCKS, BLOCK_SIZE), scheduler)
    scheduler.waiting.extend(sequences)
    steps, table = [], Table(["step", "pool", "tokens run", "what happened"], [0, NUM_BLOCKS, 0, 0])
    while scheduler.waiting or scheduler.running:
        steps.append(engine.step())
        events = "; ".join(scheduler.events)
        scheduler.events.clear()
        pool = picture(blocks, scheduler.running)
        table.add(len(steps), pool, num_tokens_run(steps[-1:]), events)

    print("\nThe same requests with day 4's scheduler, which shares nothing, in a larger pool:")
    day4_blocks, others = day3.BlockManager(LARGE_POOL, BLOCK_SIZE), new_sequences(tokenizer)
    cache = PagedCache(model.config, LARGE_POOL, BLOCK_SIZE)
    others_steps = Engine(model, cache, day4.Scheduler(day4_blocks, *limits)).run(others)
    rows = [
        (5, NUM_BLOCKS, len(steps), num_tokens_run(steps)),
        (4, LARGE_POOL, len(others_steps), num_tokens_run(others_steps)),
    ]
    print_table(["day", "blocks", "steps", "tokens run"], rows)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in others]
    print("\nBoth generated the same texts:")
    for seq in sequences:
        print(f"  {seq.name}: {show(tokenizer, seq.token_ids)}")


# Exercises (solutions: learn/solutions/day5.py)
#
# 1. A cached prompt is answered faster, so a user who measures times can find out what others have
#    asked. Give a sequence a `salt`, a text that only its user knows, and let only sequences with
#    the same salt share blocks (`SaltedSequence`, `SaltedBlockManager`). You only need to change
#    one line. Which one?
# 2. Two requests with the same prompt that enter in the same step do not share blocks, because
#    these are registered after the step. Write `EarlyScheduler`, which registers them when the step
#    is planned, before they hold anything. Which line of day 4 makes that correct?

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
