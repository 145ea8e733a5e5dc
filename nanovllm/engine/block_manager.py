"""Allocate KV-cache blocks, with reference counts, an O(1) LRU free list and a prefix cache."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence


class BlockKey(NamedTuple):
    """A full block's tokens and their hash, which is chained to the previous block's hash."""

    hash: int
    tokens: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cached block, its key, and the prefix before it (for a first block, the cache salt).

    Compared by identity: a chain of Prefix objects is exact, whereas hashes could collide.
    """

    block_id: int
    key: BlockKey
    parent: Prefix | str | None


class BlockManager:
    """Owns all blocks. A block without references stays cached until the free list reuses it."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[int, Prefix] = {}  # keyed by hash
        self._prefixes: list[Prefix | None] = [None] * num_blocks  # of the blocks in `cached`
        self.is_cached = bytearray(num_blocks)  # 1 for each of these blocks
        # Called with each block that leaves the prefix cache.
        self.on_evict: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Extend `seq` to hold `num_tokens`; return the new blocks, or None if too few are free."""
        num_new = self.num_blocks_for(num_tokens) - len(seq.block_ids)
        if num_new > len(self._free):
            return None
        block_ids = [self._take() for _ in range(num_new)]
        seq.block_ids += block_ids
        seq.capacity = len(seq.block_ids) * self.block_size
        return block_ids

    def match(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix, leaving at least one token to compute."""
        hits: list[int] = []
        if not self.enable_caching or not seq.may_hit:
            return hits
        parent: Prefix | str | None = seq.request.cache_salt
        num_full = (len(seq.token_ids) - 1) // self.block_size
        for key in self._keys(seq, num_full)[:num_full]:
            parent = self._find(key, parent)
            if parent is None:
                break
            hits.append(parent.block_id)
        return hits

    def admit(self, seq: Sequence, hits: list[int]) -> int | None:
        """Assign to `seq` the cached blocks `hits`, and new blocks for the rest of its tokens.

        Returns None on success, else how many blocks must be free before a retry can succeed.
        """
        num_idle_hits = sum(1 for block_id in hits if self._ref_counts[block_id] == 0)
        num_needed = self.num_blocks_for(len(seq.token_ids)) - len(hits) + num_idle_hits
        if num_needed > len(self._free):
            return num_needed
        for block_id in hits:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        seq.block_ids = hits
        seq.num_computed = len(hits) * self.block_size
        seq.prefix = self._prefixes[hits[-1]] if hits else seq.request.cache_salt
        seq.next_full_len = (
            seq.num_computed + self.block_size if self.enable_caching else sys.maxsize
        )
        self.allocate(seq, len(seq.token_ids))
        return None

    def release(self, seq: Sequence) -> None:
        """Drop the references of `seq` to its blocks."""
        # Reverse order: the tail of a prefix is evicted before its head.
        for block_id in reversed(seq.block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._prefixes[block_id] is None:
                    # An uncached block can never be hit, so it is reused first.
                    self._free.move_to_end(block_id, last=False)
        seq.block_ids = []
        seq.capacity = seq.num_computed = 0
        seq.next_full_len = sys.maxsize

    def register(self, seq: Sequence) -> None:
        """Add to the prefix cache the full blocks of `seq` whose tokens are known and scheduled.

        Safe before the step has run: the device runs plans in order, so another sequence reads
        such a block in the same step (after the layer has written it) or in a later one.
        """
        num_registered = seq.next_full_len // self.block_size - 1
        num_full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        keys = self._keys(seq, num_full)
        for index in range(num_registered, num_full):
            seq.prefix = self._insert(seq.block_ids[index], keys[index], seq.prefix)
        seq.next_full_len = (num_full + 1) * self.block_size

    def newest_cached_block(self, seq: Sequence) -> int | None:
        """Return the cached block that ends at the last computed token of `seq`, if any."""
        if seq.next_full_len != seq.num_computed + self.block_size:
            return None
        prefix = seq.prefix
        assert isinstance(prefix, Prefix)
        return prefix.block_id if self._prefixes[prefix.block_id] is prefix else None

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache; sequences keep the blocks they hold."""
        for prefix in list(self.cached.values()):
            self._uncache(prefix.block_id)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify all invariants against the sequences that hold blocks."""
        ref_counts = [0] * self.num_blocks
        for seq in sequences:
            assert seq.capacity == len(seq.block_ids) * self.block_size
            assert len(set(seq.block_ids)) == len(seq.block_ids), "a sequence holds a block twice"
            for block_id in seq.block_ids:
                ref_counts[block_id] += 1
        assert ref_counts == self._ref_counts, "reference counts drifted"
        assert set(self._free) == {i for i, count in enumerate(ref_counts) if count == 0}
        prefixes: list[Prefix | None] = [None] * self.num_blocks
        for key_hash, prefix in self.cached.items():
            assert key_hash == prefix.key.hash
            prefixes[prefix.block_id] = prefix
        assert prefixes == self._prefixes, "the hash table and the blocks disagree"
        assert list(self.is_cached) == [prefix is not None for prefix in prefixes]

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._uncache(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _find(self, key: BlockKey, parent: Prefix | str | None) -> Prefix | None:
        prefix = self.cached.get(key.hash)
        if prefix is None or prefix.key.tokens != key.tokens or prefix.parent != parent:
            return None
        return prefix

    def _insert(self, block_id: int, key: BlockKey, parent: Prefix | str | None) -> Prefix:
        """Cache a block, unless its prefix is cached already; return the next block's parent."""
        known = self._find(key, parent)
        if known is not None:
            return known
        if key.hash in self.cached:
            # Replace the block with the same hash: the hashes collide, or its parent was evicted.
            self._uncache(self.cached[key.hash].block_id)
        prefix = self.cached[key.hash] = self._prefixes[block_id] = Prefix(block_id, key, parent)
        self.is_cached[block_id] = 1
        return prefix

    def _uncache(self, block_id: int) -> None:
        prefix = self._prefixes[block_id]
        if prefix is not None:
            del self.cached[prefix.key.hash]
            self._prefixes[block_id] = None
            self.is_cached[block_id] = 0
            if self.on_evict is not None:
                self.on_evict(block_id)

    def _keys(self, seq: Sequence, num_full: int) -> list[BlockKey]:
        """Return the keys of the first blocks, `num_full` or more; hash each block only once."""
        keys, size = seq.block_keys, self.block_size
        if len(keys) < num_full:
            new_ids = seq.token_ids[len(keys) * size : num_full * size]
            add_keys(keys, new_ids.tobytes(), size * new_ids.itemsize, seq.request.cache_salt)
        return keys


def add_keys(keys: list[BlockKey], tokens: bytes, num_bytes: int, salt: str | None) -> None:
    """Append the keys of the full blocks in `tokens`; one block's tokens are `num_bytes` long."""
    link = keys[-1].hash if keys else xxhash.xxh3_64_intdigest((salt or "").encode())
    for start in range(0, len(tokens) - num_bytes + 1, num_bytes):
        block = tokens[start : start + num_bytes]
        link = xxhash.xxh3_64_intdigest(block, link)
        keys.append(BlockKey(link, block))
