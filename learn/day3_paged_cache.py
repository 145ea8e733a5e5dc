"""Day 3: paged blocks and block tables.

Day 2 reserved room for the longest possible text, in one piece. Nobody knows how long an output
will be, so most of that room stays empty. Today one pool of small blocks serves all sequences. A
sequence takes a block when it needs one, from anywhere in the pool, and its block table says where
each of its tokens is: virtual memory for keys and values.

From day 1: the model (`forward`, `compute_logits`, `attention`), unchanged.

    python learn/day3_paged_cache.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common import Config, Model, Table, load_from_command_line, print_table, show
from day1_forward import Attend, attention, compute_logits, forward

BLOCK_SIZE = 4  # tokens; real engines use 16 or more
NUM_BLOCKS = 14
MAX_LEN = 32  # tokens that day 2 would reserve for each sequence
MAX_NUM_SEQS = 3
REQUESTS = {  # name: (prompt, how many tokens to generate)
    "A": ("The first man on the moon was", 5),
    "B": ("The sky is blue because", 16),
    "C": ("List of planets: Mercury, Venus,", 12),
    "D": ("One, two, three,", 10),
}


@dataclass(eq=False)  # two sequences are different even if their texts are equal
class Sequence:
    """A text that grows: the prompt, then the tokens that the model adds."""

    name: str
    token_ids: list[int]
    max_tokens: int  # how many tokens to generate
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)  # ids of its blocks, in order

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def is_finished(self, eos_ids: frozenset[int]) -> bool:
        """Whether it has all its tokens, or its last one ends the text."""
        output_ids = self.output_ids
        return len(output_ids) == self.max_tokens or not eos_ids.isdisjoint(output_ids[-1:])


class BlockManager:
    """Hands out the blocks of the pool. It only counts: the tensors are in `PagedCache`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_ids = deque(range(num_blocks))

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` enough blocks for `num_tokens`; return False if too few are free."""
        num_blocks = -(-num_tokens // self.block_size)  # rounded up
        num_new = num_blocks - len(seq.block_table)
        if num_new > len(self.free_ids):
            return False
        seq.block_table += [self.free_ids.popleft() for _ in range(num_new)]
        return True

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of `seq`; the next sequence overwrites them."""
        self.free_ids.extend(seq.block_table)
        seq.block_table = []


class PagedCache:
    """The keys and values of all sequences, in one pool of slots; a slot holds one token.

    Block i consists of slots [i * block_size, (i + 1) * block_size).
    """

    def __init__(self, config: Config, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)

    def slots(self, block_table: list[int], positions: Tensor) -> Tensor:
        """Translate positions in a sequence to slots in the pool."""
        block_ids = torch.tensor(block_table)[positions // self.block_size]
        return block_ids * self.block_size + positions % self.block_size


def paged_attend(cache: PagedCache, block_table: list[int], start: int, end: int) -> Attend:
    """Return the attention function of a sequence whose tokens [start, end) run now."""
    slots = cache.slots(block_table, torch.arange(end))  # the slots of all its tokens, in order
    new_slots = slots[start:]

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.k[layer_index, new_slots] = k
        cache.v[layer_index, new_slots] = v
        # Indexing copies keys and values, in order. A real kernel reads them where they are.
        return attention(q, cache.k[layer_index, slots], cache.v[layer_index, slots])

    return attend


@torch.inference_mode()
def append_next_token(model: Model, cache: PagedCache, blocks: BlockManager, seq: Sequence) -> None:
    """Run the tokens of `seq` that have not run yet, and append the best next token."""
    start, end = seq.num_computed, len(seq.token_ids)
    if not blocks.allocate(seq, end):
        raise MemoryError("no block is free; day 5 makes room by preemption")
    attend = paged_attend(cache, seq.block_table, start, end)
    new_ids, positions = torch.tensor(seq.token_ids[start:]), torch.arange(start, end)
    hidden = forward(model, new_ids, positions, attend)
    seq.num_computed = end
    seq.token_ids.append(int(compute_logits(model, hidden[-1:])[0].argmax()))


def take_turns(
    model: Model,
    cache: PagedCache,
    blocks: BlockManager,
    requests: Iterable[Sequence],
    max_num_seqs: int,
) -> Iterator[list[Sequence]]:
    """Run several sequences, one token each per turn; yield the running ones after every turn.

    When one finishes, its blocks go back to the pool and the next request takes its place.
    """
    waiting, running = deque(requests), []
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.popleft())
        for seq in running:
            append_next_token(model, cache, blocks, seq)
        yield running
        for seq in [seq for seq in running if seq.is_finished(model.config.eos_ids)]:
            running.remove(seq)
            blocks.release(seq)


def picture(running: list[Sequence], num_blocks: int, block_size: int) -> str:
    """Draw one character per block: its owner's name, in lower case while the block has room."""
    owners = ["."] * num_blocks
    for seq in running:
        for index, block_id in enumerate(seq.block_table):
            is_full = (index + 1) * block_size <= seq.num_computed
            owners[block_id] = seq.name if is_full else seq.name.lower()
    return "".join(owners)


def main(model: Model, tokenizer: Any) -> None:
    cache = PagedCache(model.config, NUM_BLOCKS, BLOCK_SIZE)
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    requests = [
        Sequence(name, tokenizer.encode(prompt), max_tokens)
        for name, (prompt, max_tokens) in REQUESTS.items()
    ]
    print(
        f"A pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens; {MAX_NUM_SEQS} sequences may run.\n"
        "'A' is a full block of sequence A, 'a' is one with room, '.' is a free block."
    )
    turns = Table(["turn", "pool", ""], [0, NUM_BLOCKS, 0])
    held = {}  # the block table of each sequence before it is released
    for running in take_turns(model, cache, blocks, requests, MAX_NUM_SEQS):
        finished = [seq.name for seq in running if seq.is_finished(model.config.eos_ids)]
        note = f"{' and '.join(finished)} finished" if finished else ""
        turns.add(len(turns.rows) + 1, picture(running, NUM_BLOCKS, BLOCK_SIZE), note)
        held |= {seq.name: list(seq.block_table) for seq in running}

    print("\nThe block tables, and the slots that each sequence held in the end:")
    rows = []
    for seq in requests:
        table = held[seq.name]
        num_slots = len(table) * BLOCK_SIZE
        rows.append((seq.name, " ".join(map(str, table)), seq.num_computed, num_slots, MAX_LEN))
    print_table(["sequence", "block table", "computed", "slots", "day 2 reserves"], rows)
    num_tokens, num_held, num_reserved = (sum(row[i] for row in rows) for i in (2, 3, 4))
    print(
        f"\nBlocks waste {num_held - num_tokens} of {num_held} slots, always fewer than "
        f"{BLOCK_SIZE} per sequence; day 2 would waste {num_reserved - num_tokens} of "
        f"{num_reserved}.\nThe pool has {NUM_BLOCKS * BLOCK_SIZE} slots. Today it holds "
        f"{MAX_NUM_SEQS} sequences; with {MAX_LEN} slots for each, it would hold "
        f"{NUM_BLOCKS * BLOCK_SIZE // MAX_LEN}."
    )
    print("\nThe texts:")
    for seq in requests:
        print(f"  {seq.name}: {show(tokenizer, seq.token_ids)}")


# Exercises (solutions: learn/solutions/day3.py)
#
# 1. Two completions of one prompt need its keys and values only once. Count how many sequences use
#    each block, and write `SharingBlockManager.fork(cache, seq)`, which returns a copy that shares
#    all full blocks. What must happen to the last block if it is only partly filled?
# 2. A block table can change while a sequence runs. Write `swap_out(cache, blocks, seq)`,
#    which frees the blocks of a sequence and returns copies of its keys and values, and
#    `swap_in(cache, blocks, seq, saved)`, which brings them back into whatever blocks are free.
#    The output must stay the same.

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
