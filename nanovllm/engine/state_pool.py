"""StatePool: the recurrent states of sequences, and snapshots of them for the prefix cache.

A running sequence's state has the id of its slot. A snapshot belongs to a cached block, and is the
state after the block's last token. A hit must end at a snapshot: a state cannot be rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.sequence import Sequence

INTERVAL = 1024  # tokens between two snapshots of a long prompt or output


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of recurrent state `source` to state `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Numbers of states. Order of the ids: slots, padding, initial (always zero), snapshots."""

    num_slots: int
    num_snapshots: int

    @property
    def initial_id(self) -> int:
        return self.num_slots + 1

    @property
    def snapshot_ids(self) -> range:
        return range(self.num_slots + 2, self.total)

    @property
    def total(self) -> int:
        return self.num_slots + 2 + self.num_snapshots


@dataclass(slots=True)
class Snapshot:
    block_id: int
    state_id: int
    cost: int  # number of tokens to recompute without it
    priority: int  # the lowest is evicted first


class StatePool:
    """Chooses when snapshots are taken, and which are kept. The worker holds the states."""

    def __init__(self, counts: StateCounts, block_size: int) -> None:
        self.counts, self.block_size = counts, block_size
        self.interval = max(INTERVAL // block_size, 1) * block_size
        self.snapshots: dict[int, Snapshot] = {}  # keyed by block id
        self._free = list(counts.snapshot_ids)
        self._clock = 0  # priority of the last evicted snapshot
        self._due: list[tuple[Sequence, int]] = []  # with a snapshot due at this length
        self._copies: list[StateCopy] = []  # for the next plan

    def longest_hit(self, seq: Sequence, hits: list[int]) -> list[int]:
        """Return the cached blocks up to the last one with a snapshot, and set `seq.shared_len`."""
        seq.shared_len = len(hits) * self.block_size
        for count in range(len(hits), 0, -1):
            if hits[count - 1] in self.snapshots:
                return hits[:count]
        return []

    def enter(self, seq: Sequence) -> None:
        """Initialize the state of a sequence that was assigned to a slot."""
        source = self.counts.initial_id
        if seq.num_computed:
            snapshot = self.snapshots[seq.block_ids[seq.num_computed // self.block_size - 1]]
            snapshot.priority = self._clock + snapshot.cost
            source = snapshot.state_id
        seq.snapshot_len, seq.last_snapshot = seq.num_computed, None
        self._copies.append(StateCopy(source, seq.slot))

    def row_end(self, seq: Sequence, end: int) -> int:
        """Return where a row must end: at `end`, or earlier if a snapshot is due.

        Snapshots are due every `interval` tokens, after the last full block of a prompt, and where
        the prompt stops sharing blocks with an earlier one.
        """
        start = seq.num_computed
        if not self.counts.num_snapshots or end - start == 1:
            return end
        next_regular = (start // self.interval + 1) * self.interval
        ends = end, self._last_full(seq), seq.shared_len, next_regular
        return min(each for each in ends if each > start)

    def scheduled(self, seq: Sequence) -> None:
        """Mark a snapshot as due if the row just scheduled ends where `row_end` describes.

        In an output, a snapshot is due after every full block.
        """
        end = seq.num_computed
        if end % self.block_size or not self.counts.num_snapshots:
            return
        if end % self.interval == 0 or end == seq.shared_len or end >= self._last_full(seq):
            self._due.append((seq, end))

    def save(self, blocks: BlockManager) -> None:
        """Take the snapshots that are due after the previous plan."""
        for seq, length in self._due:
            # The sequence may have ended or been preempted in the meantime.
            if seq.block_ids and seq.num_computed == length:
                block_id = blocks.newest_cached_block(seq)
                if block_id is not None:
                    self._save(seq, length, block_id)
        self._due = []

    def take_copies(self) -> list[StateCopy]:
        """Return the copies that the next plan must make, in order, before it runs."""
        copies, self._copies = self._copies, []
        return copies

    def drop(self, block_id: int) -> None:
        """Free the snapshot of a block that is no longer cached, if it has one."""
        snapshot = self.snapshots.pop(block_id, None)
        if snapshot is not None:
            self._free.append(snapshot.state_id)

    def check(self, is_cached: Items[int]) -> None:
        """Verify all invariants, given a flag for each block."""
        assert all(is_cached[block_id] for block_id in self.snapshots)
        used = [snapshot.state_id for snapshot in self.snapshots.values()]
        assert sorted(used + self._free) == list(self.counts.snapshot_ids)

    def _last_full(self, seq: Sequence) -> int:
        """Return where the last full block before the last known token ends."""
        return (len(seq.token_ids) - 1) // self.block_size * self.block_size

    def _save(self, seq: Sequence, length: int, block_id: int) -> None:
        cost = length - seq.snapshot_len
        is_last = length > seq.num_prompt_tokens and length % self.interval > 0
        if not is_last:
            seq.snapshot_len = length
        if block_id in self.snapshots:
            return
        last = seq.last_snapshot
        if is_last and last is not None and self.snapshots.get(last.block_id) is last:
            # An output needs only its last snapshot: the next turn of a chat continues there.
            self.drop(last.block_id)
        if not self._free:
            # Evict the one that is cheapest to recompute; the clock favors snapshots used recently.
            victim = min(self.snapshots, key=lambda block: self.snapshots[block].priority)
            self._clock = self.snapshots[victim].priority
            self.drop(victim)
        snapshot = Snapshot(block_id, self._free.pop(), cost, self._clock + cost)
        self.snapshots[block_id] = snapshot
        seq.last_snapshot = snapshot if is_last else seq.last_snapshot
        self._copies.append(StateCopy(seq.slot, snapshot.state_id))
