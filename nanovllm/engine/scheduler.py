"""The scheduler: `schedule()` plans the next step, `commit()` appends the sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.block_manager import BlockManager, Prefix
from nanovllm.engine.feature import Feature
from nanovllm.engine.request import DraftCounts, FinishReason
from nanovllm.engine.scoring import add_columns
from nanovllm.engine.sequence import NO_SLOT, Sequence, WaitingQueue
from nanovllm.engine.step import (
    Bitmasks,
    BlockUpdate,
    DraftUpdate,
    NewRow,
    Pending,
    StateCopy,
    StepPlan,
    StepResult,
)
from nanovllm.sampling_params import NO_TOKEN

if TYPE_CHECKING:
    from nanovllm.engine.grammar import Allocate


@dataclass(slots=True, eq=False)
class Step:
    """A step from its planning to its commit; columns are plain lists while it is planned."""

    budget: int  # number of tokens that still may be added
    prompt_budget: int  # number of these that may be tokens of prompts
    num_decode_tokens: int = 0
    rows: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    draft_updates: list[DraftUpdate] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)
    excluded: Container[str] = ()  # admit no further sequence of these request_ids
    dropped: list[Sequence] = field(default_factory=list)  # discard the results of these rows
    # If set, the step is sampled in a second call, once the tokens of the previous step are known.
    get_bitmasks: Callable[[Scheduler, Step, Allocate], Bitmasks] | None = None
    plan: StepPlan = field(init=False)
    pending: Pending[StepResult] = field(init=False)  # set when the step is submitted
    submit_time: float = 0.0
    result_time: float = 0.0
    device_seconds: float = 0.0  # duration on the device
    seconds: float = 0.0  # since the result of the previous step, idle time included
    draft_counts: DraftCounts = field(default_factory=DraftCounts)  # set by `commit`

    def make_plan(self, released: list[int]) -> None:
        self.plan = StepPlan(
            slots=np.array(self.slots, np.int32),
            starts=np.array(self.starts, np.int32),
            counts=np.array(self.counts, np.int32),
            num_logits=np.array(self.num_logits, np.int32),
            new_rows=self.new_rows,
            block_updates=self.block_updates,
            released=released,
            num_decode_tokens=self.num_decode_tokens,
            needs_bitmasks=self.get_bitmasks is not None,
            draft_updates=self.draft_updates,
            state_copies=self.state_copies,
        )


class Scheduler:
    """Owns every sequence that is waiting or running.

    Plans are committed in the order they were made. The next plan may reuse freed blocks and
    slots: the device runs plans in order, so steps in flight read them before they change.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        features: Iterable[Feature] = (),
        allow_chunks: bool = True,
    ) -> None:
        self.allow_chunks = allow_chunks  # False: each prompt runs in a single step
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        # Number of prompt tokens looked up, and found, in the prefix cache.
        self.num_cache_queries = self.num_cache_hits = 0
        self.draft_counts = DraftCounts()
        self.blocks = blocks
        self.features = tuple(features)
        self.waiting = WaitingQueue()
        self.postponed: dict[int, Sequence] = {}  # sequences for which a feature is not ready
        # Ordered by priority, then by admission; the last one is preempted first.
        self.running: dict[int, Sequence] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._released: list[int] = []  # slots freed since the last plan
        # The last sequence that did not fit, until another is admitted.
        self._misfit: Sequence | None = None
        self._num_needed = 0  # number of blocks that must be free before it is tried again

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, or postpone it if a feature is not ready."""
        seq.features = tuple(feature for feature in self.features if feature.joins(seq))
        if self._is_ready(seq):
            self.waiting.add(seq)
        else:
            self.postponed[seq.seq_id] = seq

    def schedule(self) -> Step | None:
        """Plan the next step: running sequences first, then as many waiting ones as fit.

        Returns None if no sequence can run.
        """
        step = Step(self.max_num_batched_tokens, self.max_num_batched_tokens)
        for feature in self.features:
            feature.begin_step(self, step)
        self._schedule_running(step)
        self._admit_waiting(step)
        if not step.rows:
            return None
        for feature in self.features:
            feature.planned(step)
        step.make_plan(self._released)
        self._released = []
        return step

    def commit(self, step: Step, result: StepResult) -> list[Sequence]:
        """Append the tokens that a step sampled.

        Returns the sequences that finished, and all streaming ones with new tokens.
        """
        num_valid = step.num_logits if result.num_valid is None else result.num_valid.tolist()
        ended = add_columns(step, result.columns) if result.columns else []
        for seq, reason in ended:
            self.finish(seq, reason)
        updated = [seq for seq, _ in ended]
        token_ids, end = result.tokens.tolist(), 0
        for seq, count, valid in zip(step.rows, step.num_logits, num_valid, strict=True):
            first, end = end, end + count
            if not count or seq.finish_reason is not None or seq in step.dropped:
                continue
            num_known = len(seq.token_ids)
            if result.failures:
                seq.error = result.failures.get(first)
            if count == 1:
                self._append(seq, token_ids[first])
            else:
                self._append_verified(step, seq, count - 1, token_ids[first : first + valid])
            seq.num_new = len(seq.token_ids) - num_known
            if seq.new_logprobs:
                del seq.new_logprobs[seq.num_new :]
            if seq.is_streaming or seq.finish_reason is not None:
                updated.append(seq)
        for feature in self.features:
            feature.committed(step, result)
        return updated

    def resume(self, seq: Sequence) -> None:
        """Queue a postponed sequence before others of its priority, once all features are ready."""
        if self._is_ready(seq):
            del self.postponed[seq.seq_id]
            self.waiting.add(seq, is_first=True)

    def retract(self, seq: Sequence, step: Step) -> None:
        """Discard what a step in flight samples for a sequence, and postpone the sequence.

        It releases its blocks and slot. No later step may be in flight.
        """
        step.dropped.append(seq)
        seq.num_tokens, seq.drafts = len(seq.token_ids), []
        self._remove(seq)
        self.postponed[seq.seq_id] = seq

    def drop(self, steps: Iterable[Step]) -> None:
        """Discard all steps in flight, and preempt all running sequences.

        The prefix cache is reset: it may contain blocks that the discarded steps did not fill.
        """
        for seq in reversed(list(self.running.values())):
            self._preempt(seq)
        self.blocks.reset_prefix_cache()
        for seq in (seq for step in steps for seq in step.rows):
            if seq.finish_reason is None:
                seq.num_tokens, seq.drafts = len(seq.token_ids), []

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence; do nothing if it has already ended."""
        if seq.finish_reason is None:
            seq.finish_reason = reason
            for feature in seq.features:
                feature.ended(seq)
            self._remove(seq)

    def check(self) -> None:
        """Verify the invariants of the scheduler and its block manager from scratch."""
        self.blocks.check(self.running.values())
        slots = [seq.slot for seq in self.running.values()]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots)
        idle = (*self.waiting, *self.postponed.values())
        assert all(not seq.tables and seq.slot == NO_SLOT for seq in idle)
        for seq in (*self.running.values(), *idle):
            assert seq.num_computed <= seq.num_tokens <= seq.max_len
            assert seq.finish_reason is None
        for feature in self.features:
            feature.check(self)

    def _schedule_running(self, step: Step) -> None:
        # Each row takes at least one token, so at most `budget` rows can be scheduled.
        rows = list(islice(self.running.values(), step.budget))
        num_left = len(rows)
        for seq in rows:
            num_left -= 1  # each of the remaining rows needs a token
            if seq.slot == NO_SLOT or seq.num_tokens >= seq.max_len:
                continue  # preempted by an earlier row of this plan, or its last token is in flight
            if seq.is_serial and seq.num_pending:  # the host must know its pending token first
                continue
            end = self._row_end(seq, seq.num_computed + step.budget - num_left, step)
            if end == seq.num_computed or (end > seq.capacity and not self._grow(seq, end, step)):
                continue
            self._add_row(step, seq, end)

    def _row_end(self, seq: Sequence, limit: int, step: Step) -> int:
        """Return the end position of the sequence's next row, at most `limit`."""
        start, end = seq.num_computed, seq.num_tokens
        if end - start > 1:
            end = min(end, limit, start + step.prompt_budget)
            end = self.blocks.row_end(seq, end)
        for feature in seq.features:
            end = feature.row_end(seq, end, limit)
        return end

    def _grow(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Allocate blocks for `seq`; if too few are free, preempt the last running sequences.

        Returns False if `seq` itself was preempted.
        """
        while (updates := self.blocks.allocate(seq, num_tokens)) is None:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is seq:
                return False
        step.block_updates += updates
        return True

    def _is_ready(self, seq: Sequence) -> bool:
        return all(feature.is_ready(seq) for feature in seq.features)

    def _preempt(self, seq: Sequence) -> None:
        """Release everything but the tokens; the sequence is recomputed when there is room."""
        self._leave_running(seq)
        self.waiting.add(seq, is_first=True)
        self.num_preemptions += 1

    def _admit_waiting(self, step: Step) -> None:
        while step.budget and step.prompt_budget and self._free_slots:
            seq = self.waiting.first(step.excluded)
            if seq is None or seq.num_pending:  # preempted, and its last token is not known yet
                return
            if seq is self._misfit and self.blocks.num_free < self._num_needed:
                return
            if not self.allow_chunks and len(seq.token_ids) > step.budget:
                return
            num_needed = self.blocks.admit(seq, self._usable_hits(seq))
            if num_needed is not None:
                self._misfit, self._num_needed = seq, num_needed
                return
            self._misfit = None
            self.waiting.remove(seq)
            self._enter_running(seq, step)

    def _usable_hits(self, seq: Sequence) -> list[Prefix]:
        """Return the longest cached prefix after which all groups and features can continue.

        If one of them shortens it, the others are asked again.
        """
        hits, count = self.blocks.match(seq), -1
        while len(hits) != count:
            count = len(hits)
            hits = self.blocks.usable_hits(hits)
            for feature in seq.features:
                hits = feature.usable_hits(seq, hits)
        return hits

    def _enter_running(self, seq: Sequence, step: Step) -> None:
        seq.slot = self._free_slots.pop()
        seq.start_time = seq.start_time or time.perf_counter()
        if len(seq.token_ids) == seq.num_prompt_tokens:
            seq.num_cached = seq.num_computed
            self.num_cache_queries += seq.num_prompt_tokens
            self.num_cache_hits += seq.num_cached
        last = next(reversed(self.running.values()), seq)
        self.running[seq.seq_id] = seq
        if seq.priority < last.priority:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].priority))
        # A prompt that does not fit takes the rest of the budget.
        limit = min(seq.num_tokens, seq.num_computed + step.budget)
        end = self._row_end(seq, limit, step)
        # The tables of windows grow with each row. NewRow carries all tables, and so the updates.
        updates = self.blocks.allocate(seq, end)
        assert updates is not None, "`row_end` returned more than fits into the free blocks"
        step.new_rows.append(
            NewRow(
                seq.slot,
                np.array(seq.token_ids, np.int32),
                [list(table.block_ids) for table in seq.tables],
                seq.num_prompt_tokens,
                seq.request.params,
                seq.request.seed,
                seq.request.stop_token_ids,
                seq.request.bad_words,
                seq.request.pooling,
                seq.request.images,
            )
        )
        self._add_row(step, seq, end)

    def _add_row(self, step: Step, seq: Sequence, end: int) -> None:
        """Schedule `seq` up to `end`; if all tokens run, also count the one to be sampled.

        Draft tokens run after the others, but are counted only when `commit` has verified them.
        """
        start, num_tokens = seq.num_computed, seq.num_tokens
        count, num_logits = end - start, 0
        step.rows.append(seq)
        step.slots.append(seq.slot)
        step.starts.append(start)
        step.counts.append(count)
        step.budget -= count
        if end > num_tokens or seq.has_rejected:
            step.draft_updates.append(DraftUpdate(seq.slot, min(end, num_tokens), seq.drafts))
            seq.has_rejected = False
        if end >= num_tokens:
            num_logits, end = seq.num_logits + end - num_tokens, num_tokens
            seq.num_tokens += 1
        if num_logits and start >= seq.num_prompt_tokens:
            step.num_decode_tokens += count
        else:
            step.prompt_budget = max(step.prompt_budget - count, 0)
        step.num_logits.append(num_logits)
        seq.num_computed = end
        if end >= seq.next_full_len:
            self.blocks.register(seq)

    def _append_verified(
        self, step: Step, seq: Sequence, num_drafts: int, token_ids: list[int]
    ) -> None:
        """Append the draft tokens that the step accepted, and the token sampled after them."""
        num_accepted = len(token_ids) - 1
        seq.drafts = []
        seq.num_tokens += num_accepted
        if seq.slot != NO_SLOT:  # not preempted in the meantime
            seq.num_computed += num_accepted
            seq.has_rejected = True
        num_kept = -1  # accepted draft tokens up to the end of the sequence
        for token_id in token_ids:
            self._append(seq, token_id)
            num_kept += 1
            if seq.finish_reason is not None:
                break
        for counts in (self.draft_counts, step.draft_counts, seq.draft_counts):
            counts.add(num_drafts, num_kept)

    def _append(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token, and end the sequence if the token completes it."""
        if token_id == NO_TOKEN:
            self.finish(seq, "error")
            return
        seq.token_ids.append(token_id)
        num_tokens = len(seq.token_ids)
        if num_tokens == seq.num_prompt_tokens + 1 and seq.request.params.max_tokens != 0:
            seq.first_token_time = time.perf_counter()
        if seq.num_computed >= seq.next_full_len:
            self.blocks.register(seq)
        if seq.stops(token_id):
            self.finish(seq, "stop")
        elif num_tokens >= seq.max_len:
            self.finish(seq, "length")

    def _remove(self, seq: Sequence) -> None:
        if seq.seq_id in self.postponed:
            del self.postponed[seq.seq_id]
        elif seq.slot == NO_SLOT:
            self.waiting.remove(seq)
        else:
            self._leave_running(seq)

    def _leave_running(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        self.blocks.release(seq)
        self._free_slots.append(seq.slot)
        self._released.append(seq.slot)
        seq.slot, seq.has_rejected = NO_SLOT, False
