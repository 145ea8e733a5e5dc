"""StatePool: the recurrent states of sequences, and snapshots of them for the prefix cache.

A running sequence's state has the id of its slot. A snapshot belongs to a cached block, and is the
state after the block's last token. A hit must end at a snapshot: a state cannot be rolled back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.engine.executor import StateCounts
from nanovllm.engine.feature import Feature
from nanovllm.engine.step import StateCopy

if TYPE_CHECKING:
    from nanovllm.engine.block_manager import BlockManager, Prefix
    from nanovllm.engine.scheduler import Scheduler, Step
    from nanovllm.engine.sequence import Sequence

INTERVAL = 1024  # tokens between two snapshots of a long prompt or output


@dataclass(slots=True)
class Snapshot:
    block_id: int  # in the first group of layers
    state_id: int
    cost: int  # number of tokens to recompute without it
    priority: int  # the lowest is evicted first


PromptKey = tuple[str, int, str | None, bytes]  # request_id, priority, cache salt, tokens


@dataclass(slots=True)
class Progress:
    """What the pool knows about a sequence."""

    key: PromptKey
    source: Snapshot | None = None  # state that its prefix hit continues; None: the initial state
    snapshot_len: int = 0  # length of the longest prefix with a snapshot, `last` excluded
    last: Snapshot | None = None  # latest one in the output; the next one replaces it


class StatePool(Feature):
    """Chooses when snapshots are taken, and which are kept. The worker holds the states.

    Of several sequences with the same prompt in a request, the first computes it; the others are
    postponed until its snapshot can be used.
    """

    def __init__(self, counts: StateCounts, blocks: BlockManager) -> None:
        self.counts, self.block_size = counts, blocks.block_size
        self.interval = max(INTERVAL // self.block_size, 1) * self.block_size
        self.snapshots: dict[int, Snapshot] = {}  # keyed by block id
        self._progress: dict[int, Progress] = {}  # keyed by seq_id
        self._firsts: dict[PromptKey, Sequence] = {}  # first unfinished sequence of each prompt
        self._postponed: defaultdict[PromptKey, dict[int, Sequence]] = defaultdict(dict)
        self._ready: list[PromptKey] = []  # prompts whose postponed sequences may run
        self._free = list(counts.snapshot_ids)
        self._clock = 0  # priority of the last evicted snapshot
        self._due: list[tuple[Sequence, int]] = []  # sequences, and where a snapshot of each is due
        self._copies: list[StateCopy] = []  # copies to add to the next plan
        blocks.on_evict = self.drop

    def joins(self, seq: Sequence) -> bool:
        request = seq.request
        tokens = request.token_ids.tobytes()
        key = seq.request_id, seq.priority, request.cache_salt, tokens
        self._progress[seq.seq_id] = Progress(key)
        return True

    def is_ready(self, seq: Sequence) -> bool:
        key = self._progress[seq.seq_id].key
        first = self._firsts.setdefault(key, seq)
        can_hit = self.counts.num_snapshots and seq.may_hit and self._last_full(seq)
        if first is seq or _is_prefilled(first) or not can_hit:
            return True
        self._postponed[key][seq.seq_id] = seq
        return False

    def begin_step(self, scheduler: Scheduler, step: Step) -> None:
        for seq, length in self._due:
            # The sequence may have ended or been preempted in the meantime.
            if seq.tables and seq.num_computed == length:
                block_id = scheduler.blocks.newest_cached_block(seq)
                if block_id is not None:
                    self._save(seq, length, block_id)
        self._due = []
        ready, self._ready = self._ready, []
        for key in ready:
            seqs = list(self._postponed[key].values())
            if key not in self._firsts:  # it ended early, so the next one computes the prompt
                seqs = seqs[:1]
            for seq in reversed(seqs):
                del self._postponed[key][seq.seq_id]
                scheduler.resume(seq)
            if not self._postponed[key]:
                del self._postponed[key]

    def planned(self, step: Step) -> None:
        new_slots = {row.slot for row in step.new_rows}
        for seq, start in zip(step.rows, step.starts, strict=True):
            if seq.slot in new_slots:
                self._enter(seq, start)
            if seq.num_computed % self.block_size == 0:
                self._mark_due(seq)
            if start < seq.num_prompt_tokens <= seq.num_computed and self._postponed:
                self._ready.append(self._progress[seq.seq_id].key)
        step.state_copies, self._copies = self._copies, []

    def usable_hits(self, seq: Sequence, hits: list[Prefix]) -> list[Prefix]:
        """Return the cached blocks up to the last one with a snapshot."""
        progress = self._progress[seq.seq_id]
        for count in range(len(hits), 0, -1):
            progress.source = self.snapshots.get(hits[count - 1].block_ids[0])
            if progress.source is not None:
                return hits[:count]
        progress.source = None
        return []

    def row_end(self, seq: Sequence, end: int, limit: int) -> int:
        """Return where a row must end: at `end`, or earlier if a snapshot is due.

        Snapshots are due every `interval` tokens, after the last full block of a prompt, and where
        the prompt stops sharing blocks with an earlier one.
        """
        start = seq.num_computed
        if not self.counts.num_snapshots or end - start <= 1:
            return end
        next_regular = (start // self.interval + 1) * self.interval
        ends = end, self._last_full(seq), seq.shared_len, next_regular
        return min(each for each in ends if each > start)

    def ended(self, seq: Sequence) -> None:
        key = self._progress.pop(seq.seq_id).key
        self._postponed[key].pop(seq.seq_id, None)
        if self._firsts.get(key) is seq:
            del self._firsts[key]
            self._ready.append(key)
        if not self._postponed[key]:
            del self._postponed[key]

    def drop(self, block_id: int) -> None:
        """Free the snapshot of a block that is no longer cached, if it has one."""
        snapshot = self.snapshots.pop(block_id, None)
        if snapshot is not None:
            self._free.append(snapshot.state_id)

    def check(self, scheduler: Scheduler) -> None:
        assert all(scheduler.blocks.is_cached[block_id] for block_id in self.snapshots)
        used = [snapshot.state_id for snapshot in self.snapshots.values()]
        assert sorted(used + self._free) == list(self.counts.snapshot_ids)
        for key, seqs in self._postponed.items():
            assert seqs.keys() <= scheduler.postponed.keys()
            assert key in self._firsts or key in self._ready

    def _enter(self, seq: Sequence, start: int) -> None:
        """Initialize the state of a sequence that was assigned to a slot."""
        progress, state_id = self._progress[seq.seq_id], self.counts.initial_id
        if (source := progress.source) is not None:
            # A block with an equal hash may have replaced the hit in this plan. That freed the
            # state's id, but only a later plan overwrites the state.
            source.priority = self._clock + source.cost
            state_id = source.state_id
        progress.source, progress.snapshot_len, progress.last = None, start, None
        self._copies.append(StateCopy(state_id, seq.slot))

    def _mark_due(self, seq: Sequence) -> None:
        """Mark a snapshot as due if the row just planned ends where `row_end` describes.

        In an output, a snapshot is due after every full block.
        """
        end = seq.num_computed
        if not self.counts.num_snapshots:
            return
        is_regular = end % self.interval == 0 or end >= self._last_full(seq)
        if is_regular or end == seq.shared_len:
            self._due.append((seq, end))

    def _last_full(self, seq: Sequence) -> int:
        """Return where the last full block before the last known token ends."""
        return (len(seq.token_ids) - 1) // self.block_size * self.block_size

    def _save(self, seq: Sequence, length: int, block_id: int) -> None:
        progress = self._progress[seq.seq_id]
        cost = length - progress.snapshot_len
        is_last = length > seq.num_prompt_tokens and length % self.interval > 0
        if not is_last:
            progress.snapshot_len = length
        if block_id in self.snapshots:
            return
        last = progress.last
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
        progress.last = snapshot if is_last else progress.last
        self._copies.append(StateCopy(seq.slot, snapshot.state_id))


def _is_prefilled(seq: Sequence) -> bool:
    return seq.num_computed >= seq.num_prompt_tokens
