"""Solutions of day 3.

PYTHONPATH=learn python learn/solutions/day3.py
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from common import Model, load_from_command_line, show
from day3_paged_cache import BlockManager, PagedCache, Sequence, append_next_token


# Exercise 1: a block is free again when its last user releases it. A full block never changes, so
# it can be shared. Both sequences will write to a partly filled block, so the copy gets its own.
class SharingBlockManager(BlockManager):
    """A block manager that counts how many sequences use each block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_users = [0] * num_blocks

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        num_old = len(seq.block_table)
        is_done = super().allocate(seq, num_tokens)
        for block_id in seq.block_table[num_old:]:
            self.num_users[block_id] = 1
        return is_done

    def release(self, seq: Sequence) -> None:
        for block_id in seq.block_table:
            self.num_users[block_id] -= 1
            if self.num_users[block_id] == 0:
                self.free_ids.append(block_id)
        seq.block_table = []

    def fork(self, cache: PagedCache, seq: Sequence) -> Sequence:
        """Return a copy of `seq` that shares its full blocks."""
        fork = copy.copy(seq)
        fork.token_ids = list(seq.token_ids)
        num_full = seq.num_computed // self.block_size
        fork.block_table = seq.block_table[:num_full]
        for block_id in fork.block_table:
            self.num_users[block_id] += 1
        if not self.allocate(fork, seq.num_computed):
            raise MemoryError("no block is free for the copy")
        positions = torch.arange(num_full * self.block_size, seq.num_computed)
        source, target = (cache.slots(each.block_table, positions) for each in (seq, fork))
        cache.k[:, target], cache.v[:, target] = cache.k[:, source], cache.v[:, source]
        return fork


# Exercise 2: nothing depends on the ids of the blocks, only on the order in the table.
def swap_out(cache: PagedCache, blocks: BlockManager, seq: Sequence) -> tuple[Tensor, Tensor]:
    """Free the blocks of `seq`; return its keys and values."""
    slots = cache.slots(seq.block_table, torch.arange(seq.num_computed))
    blocks.release(seq)
    return cache.k[:, slots], cache.v[:, slots]  # indexing with a tensor copies


def swap_in(
    cache: PagedCache, blocks: BlockManager, seq: Sequence, saved: tuple[Tensor, Tensor]
) -> None:
    """Bring keys and values back, into any free blocks."""
    if not blocks.allocate(seq, seq.num_computed):
        raise MemoryError("too few blocks are free to swap in")
    slots = cache.slots(seq.block_table, torch.arange(seq.num_computed))
    cache.k[:, slots], cache.v[:, slots] = saved


def main(model: Model, tokenizer: Any) -> None:
    """Continue one prompt in two ways, in shared blocks; then move one of them."""
    cache, blocks = PagedCache(model.config, 16, 4), SharingBlockManager(16, 4)
    first = Sequence("A", tokenizer.encode("The first man on the moon was"), max_tokens=8)
    append_next_token(model, cache, blocks, first)
    second = blocks.fork(cache, first)
    second.token_ids[-1:] = tokenizer.encode(" not")
    for seq in (first, second):
        for _ in range(6):
            append_next_token(model, cache, blocks, seq)
        print(f"{show(tokenizer, seq.token_ids)}: blocks {seq.block_table}")

    print(f"\n{first.name} before the swap: blocks {first.block_table}")
    saved = swap_out(cache, blocks, first)
    append_next_token(model, cache, blocks, second)
    swap_in(cache, blocks, first, saved)
    append_next_token(model, cache, blocks, first)
    print(f"after it: blocks {first.block_table}, {show(tokenizer, first.token_ids)}")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
