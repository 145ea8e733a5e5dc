"""Allocate KV-cache blocks, with reference counts, an O(1) LRU free list and a prefix cache.

Layers that share a block table form a group. All groups take equal blocks from one pool. A group
with a sliding window frees the blocks that no later token can see; full attention is a window
without end.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from nanovllm.engine.step import BlockUpdate

if TYPE_CHECKING:
    from nanovllm.engine.executor import Windows
    from nanovllm.engine.sequence import Sequence

NO_BLOCK = -1


class BlockKey(NamedTuple):
    """A full block's tokens and their hash, which is chained to the previous block's hash."""

    hash: int
    tokens: bytes


@dataclass(slots=True, eq=False)
class Prefix:
    """Cached tokens up to the end of a block: its key, and the prefix before it (or the salt).

    It can be found while one of its blocks or a longer prefix is cached. Compared by identity: a
    chain of Prefix objects is exact, whereas hashes could collide.
    """

    key: BlockKey
    parent: Prefix | str | None
    block_ids: list[int]  # the last block of each group; NO_BLOCK if it is not cached
    num_children: int = 0  # number of prefixes, longer by one block, that can be found

    @property
    def is_needed(self) -> bool:
        return self.num_children > 0 or any(block_id != NO_BLOCK for block_id in self.block_ids)


@dataclass(slots=True)
class BlockTable:
    """The blocks of a sequence in one group of layers."""

    block_ids: list[int]
    first: int  # index of the first block that it holds; entries before it are undefined

    @property
    def held_block_ids(self) -> list[int]:
        return self.block_ids[self.first :]


def reach_of(window: int | None, block_size: int) -> int:
    """Return how many blocks before a block boundary the next token may see."""
    return sys.maxsize if window is None else max(-(-(window - 1) // block_size), 1)


class BlockManager:
    """Owns all blocks. A block without references stays cached until it is reused."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        windows: Windows = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_groups = len(windows)
        self._reaches = [reach_of(window, block_size) for window in windows]
        self._num_windows = sum(window is not None for window in windows)
        self._ref_counts = [0] * num_blocks
        self.num_held = [0] * self.num_groups  # number of blocks with references, of each group
        # Free blocks in the order of reuse: first those that are not cached, then those that a
        # window has passed, and finally the others, least recently used first.
        self._expendable: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._recent: OrderedDict[int, None] = OrderedDict()
        self.cached: dict[int, Prefix] = {}  # keyed by hash
        self._prefixes: list[Prefix | None] = [None] * num_blocks  # of each cached block
        self.is_cached = bytearray(num_blocks)  # 1 for each of these blocks
        # Called with each block that leaves the prefix cache.
        self.on_evict: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._expendable) + len(self._recent)

    @property
    def num_free_tokens(self) -> int:
        """Number of tokens by which one sequence can grow, apart from blocks it already holds."""
        return self.num_free // self.num_groups * self.block_size

    def max_tokens(self) -> int:
        """Return the length of the longest sequence that fits alone."""

        def num_held(num_blocks: int) -> int:
            return sum(min(num_blocks, reach + 1) for reach in self._reaches)

        num_blocks = bisect_right(range(1 << 31), self.num_blocks, key=num_held) - 1
        return num_blocks * self.block_size

    def match(self, seq: Sequence) -> list[Prefix]:
        """Return the longest prefix that can be found, leaving at least one token to compute.

        `usable_hits` then tells how much of it can be reused. Also sets the sequence's `shared_len`
        and `has_branch`, which do not depend on that.
        """
        hits: list[Prefix] = []
        seq.shared_len, seq.has_branch = 0, False
        if not self.enable_caching or not seq.may_hit:
            return hits
        parent: Prefix | str | None = seq.request.cache_salt
        num_full = (len(seq.token_ids) - 1) // self.block_size
        for key in self._keys(seq, num_full)[:num_full]:
            parent = self._find(key, parent)
            if parent is None:
                break
            hits.append(parent)
        seq.shared_len = len(hits) * self.block_size
        seq.has_branch = bool(hits) and hits[-1].num_children > 0
        return hits

    def usable_hits(self, hits: list[Prefix]) -> list[Prefix]:
        """Return the leading hits after which every group has the blocks that a token may see."""
        # Going left, `count` only shrinks. Of the blocks that are then needed, none was passed yet.
        count = len(hits)
        for index in range(len(hits) - 1, -1, -1):
            block_ids = hits[index].block_ids
            if NO_BLOCK in block_ids:
                for reach, block_id in zip(self._reaches, block_ids, strict=True):
                    if block_id == NO_BLOCK and index >= count - reach:
                        count = index
        return hits[:count]

    def admit(self, seq: Sequence, hits: list[Prefix]) -> int | None:
        """Assign to `seq` the blocks of `hits`, and new blocks for the rest of its tokens.

        A window takes one new block, and more with each row. Returns None on success, else how many
        blocks must be free before a retry can succeed.
        """
        num_hits, ref_counts = len(hits), self._ref_counts
        num_new = self.num_blocks_for(len(seq.token_ids)) - num_hits
        nums_new = [num_new if reach == sys.maxsize else 1 for reach in self._reaches]
        tables, num_needed = [], sum(nums_new)
        for group, reach in enumerate(self._reaches):
            first = max(num_hits - reach, 0)
            held = [prefix.block_ids[group] for prefix in hits[first:]]
            tables.append(BlockTable([0] * first + held, first))
            num_needed += sum([ref_counts[block_id] == 0 for block_id in held])
        if num_needed > self.num_free:
            return num_needed
        for group, table in enumerate(tables):
            for block_id in table.held_block_ids:
                self._hold(block_id, group)
        for group, count in enumerate(nums_new):
            tables[group].block_ids.extend(self._take(group) for _ in range(count))
        seq.tables = tables
        seq.capacity = min([len(table.block_ids) for table in tables]) * self.block_size
        seq.num_computed = num_hits * self.block_size
        seq.prefix = hits[-1] if hits else seq.request.cache_salt
        seq.next_full_len = (
            seq.num_computed + self.block_size if self.enable_caching else sys.maxsize
        )
        return None

    def row_end(self, seq: Sequence, end: int) -> int:
        """Return where a row of several tokens must end: at `end`, or where windows lack blocks.

        First free the blocks that its windows have passed. The row may take half of the free
        blocks, and preempts others for at most one block per window.
        """
        if not self._num_windows:
            return end
        self._free_passed(seq)
        room = self.num_free // (2 * self._num_windows) * self.block_size
        next_block_end = (seq.num_computed // self.block_size + 1) * self.block_size
        return min(end, max(seq.capacity + room, next_block_end))

    def allocate(self, seq: Sequence, num_tokens: int) -> list[BlockUpdate] | None:
        """Extend `seq` to hold `num_tokens`; return the new blocks, or None if too few are free.

        First free the blocks that its windows have passed.
        """
        if self._num_windows:
            self._free_passed(seq)
        num_blocks = self.num_blocks_for(num_tokens)
        num_left = self.num_free
        for table in seq.tables:
            if (num_new := num_blocks - len(table.block_ids)) > 0:
                num_left -= num_new
        if num_left < 0:
            return None
        updates: list[BlockUpdate] = []
        for group, table in enumerate(seq.tables):
            block_ids = table.block_ids
            for index in range(len(block_ids), num_blocks):
                block_id = self._take(group)
                block_ids.append(block_id)
                updates.append(BlockUpdate(seq.slot, index, block_id, group))
        if updates:
            seq.capacity = num_blocks * self.block_size
        return updates

    def release(self, seq: Sequence) -> None:
        """Drop the references of `seq` to its blocks."""
        # Reverse order: the tail of a prefix is evicted before its head.
        for group, table in enumerate(seq.tables):
            for block_id in reversed(table.held_block_ids):
                self._drop(block_id, group, self._recent)
        seq.tables = []
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
            seq.prefix = self._insert(seq.tables, index, keys[index], seq.prefix)
        seq.next_full_len = (num_full + 1) * self.block_size

    def newest_cached_block(self, seq: Sequence) -> int | None:
        """Return the first group's cached block that ends at the last computed token, if any."""
        if seq.next_full_len != seq.num_computed + self.block_size:
            return None
        prefix = seq.prefix
        assert isinstance(prefix, Prefix)
        return prefix.block_ids[0] if prefix.block_ids[0] != NO_BLOCK else None

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache; sequences keep the blocks they hold."""
        for block_id in range(self.num_blocks):
            self._uncache(block_id)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify all invariants against the sequences that hold blocks."""
        ref_counts = [0] * self.num_blocks
        held: list[set[int]] = [set() for _ in self._reaches]
        for seq in sequences:
            assert seq.capacity == min(len(t.block_ids) for t in seq.tables) * self.block_size
            held_ids = seq.held_block_ids
            assert len(set(held_ids)) == len(held_ids), "a sequence holds a block twice"
            for block_id in held_ids:
                ref_counts[block_id] += 1
            for table, reach, block_ids in zip(seq.tables, self._reaches, held, strict=True):
                block_ids.update(table.held_block_ids)
                most = max(seq.num_computed // self.block_size - reach, 0)
                assert table.first <= most, "a block was freed that the next token may see"
        assert ref_counts == self._ref_counts, "reference counts drifted"
        assert list(map(len, held)) == self.num_held
        assert sum(self.num_held) + self.num_free == self.num_blocks
        free = [*self._expendable, *self._recent]
        assert sorted(free) == [i for i, count in enumerate(ref_counts) if count == 0]
        prefixes: list[Prefix | None] = [None] * self.num_blocks
        num_children = Counter(prefix.parent for prefix in self.cached.values())
        for key_hash, prefix in self.cached.items():
            assert key_hash == prefix.key.hash
            assert prefix.num_children == num_children[prefix]
            assert prefix.is_needed
            for block_id in prefix.block_ids:
                if block_id != NO_BLOCK:
                    assert prefixes[block_id] is None, "a block is cached twice"
                    prefixes[block_id] = prefix
        assert prefixes == self._prefixes, "the hash table and the blocks disagree"
        assert list(self.is_cached) == [prefix is not None for prefix in prefixes]

    def _free_passed(self, seq: Sequence) -> None:
        """Free the blocks that no token from `num_computed` on can see.

        The last ones before a branch are reused later than the others: prompts continue there.
        """
        start = seq.num_computed // self.block_size
        branch = seq.shared_len // self.block_size if seq.has_branch else 0
        for group, (table, reach) in enumerate(zip(seq.tables, self._reaches, strict=True)):
            for index in range(table.first, start - reach):
                is_kept = branch - reach <= index < branch
                free = self._recent if is_kept else self._expendable
                self._drop(table.block_ids[index], group, free)
            table.first = max(table.first, start - reach)

    def _take(self, group: int) -> int:
        block_id, _ = (self._expendable or self._recent).popitem(last=False)
        self._uncache(block_id)
        self._ref_counts[block_id] = 1
        self.num_held[group] += 1
        return block_id

    def _hold(self, block_id: int, group: int) -> None:
        if self._ref_counts[block_id] == 0:
            del (self._recent if block_id in self._recent else self._expendable)[block_id]
            self.num_held[group] += 1
        self._ref_counts[block_id] += 1

    def _drop(self, block_id: int, group: int, free: OrderedDict[int, None]) -> None:
        """Drop a reference to a block; if it was the last one, add a cached block to `free`."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self.num_held[group] -= 1
            if self._prefixes[block_id] is not None:
                free[block_id] = None
            else:  # it can never be hit
                self._expendable[block_id] = None
                self._expendable.move_to_end(block_id, last=False)

    def _find(self, key: BlockKey, parent: Prefix | str | None) -> Prefix | None:
        prefix = self.cached.get(key.hash)
        if prefix is None or prefix.key.tokens != key.tokens or prefix.parent != parent:
            return None
        return prefix

    def _insert(
        self, tables: list[BlockTable], index: int, key: BlockKey, parent: Prefix | str | None
    ) -> Prefix:
        """Cache the blocks at `index`, unless the prefix already has them; return the prefix."""
        prefix = self._find(key, parent)
        if prefix is None:
            if key.hash in self.cached:  # the hashes collide, or the parent was evicted
                self._replace(self.cached[key.hash])
            prefix = self.cached[key.hash] = Prefix(key, parent, [NO_BLOCK] * self.num_groups)
            if isinstance(parent, Prefix):
                parent.num_children += 1
        known = prefix.block_ids
        for group, table in enumerate(tables):
            if known[group] == NO_BLOCK:
                known[group] = block_id = table.block_ids[index]
                self._prefixes[block_id] = prefix
                self.is_cached[block_id] = 1
        return prefix

    def _uncache(self, block_id: int) -> None:
        prefix = self._prefixes[block_id]
        if prefix is not None:
            prefix.block_ids[prefix.block_ids.index(block_id)] = NO_BLOCK
            self._prefixes[block_id] = None
            self.is_cached[block_id] = 0
            if self.on_evict is not None:
                self.on_evict(block_id)
            if not prefix.is_needed:
                self._forget(prefix)

    def _replace(self, prefix: Prefix) -> None:
        """Remove a prefix whose hash another one takes; the longer ones can never be hit again."""
        for block_id in prefix.block_ids:
            if block_id != NO_BLOCK:
                self._uncache(block_id)
        self._forget(prefix)  # `_uncache` has done so, unless longer prefixes need it

    def _forget(self, prefix: Prefix) -> None:
        """Remove a prefix, and those before it that are no longer needed either."""
        while self.cached.get(prefix.key.hash) is prefix:
            del self.cached[prefix.key.hash]
            parent = prefix.parent
            if not isinstance(parent, Prefix):
                return
            parent.num_children -= 1
            if parent.is_needed:
                return
            prefix = parent

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
