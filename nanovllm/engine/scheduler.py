"""The scheduler: `schedule()` plans the next step, `commit()` appends the sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.grammar import Matcher
from nanovllm.engine.prompt_budget import PromptBudget
from nanovllm.engine.request import DraftCounts, FinishReason
from nanovllm.engine.sequence import NO_SLOT, Sequence, WaitingQueue
from nanovllm.engine.step import (
    BlockCopy,
    BlockUpdate,
    DraftUpdate,
    NewRow,
    Pending,
    StepPlan,
    StepResult,
)
from nanovllm.sampling_params import NO_TOKEN

if TYPE_CHECKING:
    from nanovllm.engine.drafter import Drafter
    from nanovllm.engine.state_pool import StateCopy


@dataclass(slots=True, eq=False)
class Step:
    """A step from its planning to its commit; columns are plain lists while it is planned."""

    budget: int  # number of tokens that still may be added
    num_decode_tokens: int = 0
    rows: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)
    masked_rows: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    draft_updates: list[DraftUpdate] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)  # request_ids of rows that end in a prompt
    plan: StepPlan = field(init=False)
    pending: Pending[StepResult] = field(init=False)  # set when the step is submitted
    submit_time: float = 0.0
    result_time: float = 0.0
    device_seconds: float = 0.0  # duration on the device
    seconds: float = 0.0  # since the result of the previous step, idle time included
    num_accepted: int = 0  # accepted draft tokens
    num_rejected: int = 0

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
            masked_rows=np.array(self.masked_rows, np.int32),
            block_copies=self.block_copies,
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
        prompt_budget: PromptBudget | None = None,
        drafter: Drafter | None = None,
        allow_chunks: bool = True,
    ) -> None:
        self.allow_chunks = allow_chunks  # False: each prompt runs in a single step
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        # Number of prompt tokens looked up, and found, in the prefix cache.
        self.num_cache_queries = self.num_cache_hits = 0
        self.blocks, self.states = blocks, blocks.states
        self.prompt_budget = prompt_budget  # None: only max_num_batched_tokens limits prompts
        self.drafter = drafter  # None: no speculative decoding
        self.waiting = WaitingQueue()
        # Sequences whose grammar is not compiled yet, or whose next bitmask is not computed yet.
        self.waiting_for_grammar: dict[int, Sequence] = {}
        # Ordered by priority, then by admission; the last one is preempted first.
        self.running: dict[int, Sequence] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._released: list[int] = []  # slots freed since the last plan
        # The last sequence that did not fit, and the number of free blocks that it needed.
        self._misfit: tuple[Sequence | None, int] = None, 0
        # Leaders (sequences with followers) whose prefill the last plan completed.
        self._prefilled_leaders: list[Sequence] = []
        self._newest: list[Sequence] = []  # rows of the latest step

    @property
    def draft_counts(self) -> DraftCounts:
        return DraftCounts() if self.drafter is None else self.drafter.counts

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; a further sample of a prompt waits for its leader's prefill."""
        leader = seq.leader
        if leader is not None and leader.num_computed < leader.num_prompt_tokens:
            leader.followers[seq.seq_id] = seq
            return
        self._enqueue(seq)

    def schedule(self) -> Step | None:
        """Plan the next step: running sequences first, then as many waiting ones as fit.

        Returns None if no sequence can run.
        """
        step = Step(self.max_num_batched_tokens)
        if self.states is not None:
            self.states.save(self.blocks)
        while self._prefilled_leaders:
            self._enqueue_followers(self._prefilled_leaders.pop())
        if self.waiting_for_grammar:
            self._enqueue_ready()
        if self.drafter is not None:
            num_possible = min(len(self.running) + len(self.waiting), self.max_num_seqs)
            num_unused = self.max_num_seqs - num_possible
            self.drafter.begin_step(len(self.running), num_unused, self._newest)
        self._schedule_running(step)
        self._admit_waiting(step)
        if not step.rows:
            return None
        if self.states is not None:
            step.state_copies = self.states.take_copies()
        step.make_plan(self._released)
        self._released, self._newest = [], step.rows
        return step

    def commit(self, step: Step, result: StepResult) -> list[Sequence]:
        """Append the tokens that a step sampled.

        Returns the sequences that finished, and all streaming ones with new tokens.
        """
        plan = step.plan
        if self.prompt_budget is not None:
            counts = plan.num_prefill_tokens, step.num_decode_tokens
            self.prompt_budget.measured(*counts, step.device_seconds)
        num_valid = step.num_logits if result.num_valid is None else result.num_valid.tolist()
        updated = self._add_columns(step.rows, plan, result.columns) if result.columns else []
        token_ids, end = result.tokens.tolist(), 0
        for seq, count, valid in zip(step.rows, step.num_logits, num_valid, strict=True):
            first, end = end, end + count
            if not count or seq.finish_reason is not None:  # not sampled, or has already ended
                continue
            if seq.is_dropped:
                seq.is_dropped = False
                continue
            num_known = len(seq.token_ids)
            if result.failures:
                seq.error = result.failures.get(first)
            if count == 1:
                self._append(seq, token_ids[first])
            else:
                self._append_verified(step, seq, token_ids[first : first + valid])
            seq.num_new = len(seq.token_ids) - num_known
            if seq.new_logprobs:
                del seq.new_logprobs[seq.num_new :]
            if seq.is_streaming or seq.finish_reason is not None:
                updated.append(seq)
        if self.drafter is not None and not plan.num_prefill_tokens:
            # The duration includes idle time of the device, because drafting delays the plan.
            num_rows = step.num_decode_tokens
            num_tokens = num_rows - step.num_rejected
            self.drafter.measured(len(step.rows), num_rows, num_tokens, step.seconds)
        return updated

    def matchers(self, step: Step) -> list[tuple[Matcher | None, list[int]]]:
        """Return the matchers and drafts of the masked rows of the oldest step in flight.

        The matcher is None if the sequence has ended in the meantime.
        """
        masked = [step.rows[row] for row in step.masked_rows]
        return [
            (None if seq.finish_reason is not None else seq.matcher, seq.drafts) for seq in masked
        ]

    def wait_for_grammar(self, seqs: list[Sequence]) -> None:
        """Discard what the oldest step in flight samples for sequences that have no bitmasks yet.

        They release their blocks and slots, and wait for their bitmasks.
        """
        for seq in seqs:
            if seq.finish_reason is not None:
                continue
            seq.num_tokens -= 1
            seq.is_dropped, seq.drafts = True, []
            self._leave_running(seq)
            self.waiting_for_grammar[seq.seq_id] = seq

    def drop(self, steps: list[Step]) -> None:
        """Discard all steps in flight, and preempt all running sequences.

        The prefix cache is reset: it may contain blocks that the discarded steps did not fill.
        """
        rows = {seq.seq_id: seq for step in steps for seq in step.rows}
        for seq in reversed(list(self.running.values())):
            self._preempt(seq)
        self.blocks.reset_prefix_cache()
        self._newest = []
        for seq in rows.values():
            if seq.finish_reason is None:
                seq.num_tokens, seq.is_dropped, seq.drafts = len(seq.token_ids), False, []

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence early (abort, stop string); do nothing if it has already ended."""
        if seq.finish_reason is None:
            self._end(seq, reason)

    def check(self) -> None:
        """Verify the invariants of the scheduler and its block manager from scratch."""
        self.blocks.check(self.running.values())
        slots = [seq.slot for seq in self.running.values()]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots)
        idle = (*self.waiting, *self.waiting_for_grammar.values())
        assert all(not seq.block_ids and seq.slot == NO_SLOT for seq in idle)
        for seq in (*self.running.values(), *idle):
            assert seq.num_computed <= seq.num_tokens <= seq.max_len
            assert seq.finish_reason is None

    @property
    def _last_running(self) -> Sequence:
        return self.running[next(reversed(self.running))]

    def _schedule_running(self, step: Step) -> None:
        # Each row takes at least one token, so at most `budget` rows can be scheduled.
        rows = list(islice(self.running.values(), step.budget))
        if self.prompt_budget is None:
            self._schedule_rows(rows, step)
            return
        # Decode rows come first, regardless of priority, so that they never wait for a prefill.
        prompts = [seq for seq in rows if seq.num_tokens - seq.num_computed > 1]
        prompts.sort(key=self.waiting.has_more)  # requests with many prompts come last
        self._schedule_rows([seq for seq in rows if seq.num_tokens - seq.num_computed == 1], step)
        if step.num_decode_tokens:
            most = self.prompt_budget.num_prompt_tokens(step.num_decode_tokens)
            step.budget = min(step.budget, most)
        elif self.allow_chunks and (
            self.waiting.has_series or any(map(self.waiting.has_more, prompts))
        ):
            step.budget = min(step.budget, self.prompt_budget.num_queued_tokens())
        self._schedule_rows(prompts, step)

    def _schedule_rows(self, rows: list[Sequence], step: Step) -> None:
        drafter = self.drafter
        for index, seq in enumerate(rows, 1):
            if step.budget == 0:
                return
            num_tokens = seq.num_tokens
            if seq.slot == NO_SLOT or num_tokens >= seq.max_len:
                continue  # preempted by an earlier row of this plan, or its last token is in flight
            if drafter is not None and drafter.must_wait(seq):
                continue
            if seq.is_serial and seq.num_pending:  # the host must know its pending token first
                continue
            last = end = self._row_end(seq, step)
            drafts: list[int] | None = None
            if drafter is not None:
                num_left = len(rows) - index  # each of the remaining rows needs a token
                drafts = drafter.draft(seq, step.budget - 1 - num_left, self.blocks)
                last += len(drafts)
            if last > seq.capacity and not self._grow(seq, last, step):
                continue
            self._add_row(step, seq, end, drafts)

    def _grow(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Allocate blocks for `seq`; if too few are free, preempt the last running sequences.

        Returns False if `seq` itself was preempted.
        """
        first_index = len(seq.block_ids)
        while (block_ids := self.blocks.allocate(seq, num_tokens)) is None:
            victim = self._last_running
            self._preempt(victim)
            if victim is seq:
                return False
        for index, block_id in enumerate(block_ids, first_index):
            step.block_updates.append(BlockUpdate(seq.slot, index, block_id))
        return True

    def _enqueue_followers(self, leader: Sequence) -> None:
        """Queue the followers of a leader that has been prefilled, or has ended."""
        for follower in reversed(leader.followers.values()):
            self._enqueue(follower, is_first=True)
        leader.followers = {}

    def _enqueue(self, seq: Sequence, is_first: bool = False) -> None:
        """Put a sequence into the waiting queue, or let it wait for its grammar."""
        if seq.matcher is not None and not seq.matcher.is_ready:
            self.waiting_for_grammar[seq.seq_id] = seq
            return
        self.waiting.add(seq, is_first=is_first)

    def _enqueue_ready(self) -> None:
        """Move sequences whose next bitmask is ready from `waiting_for_grammar` to `waiting`."""
        for seq in list(self.waiting_for_grammar.values()):
            if not seq.is_dropped and seq.matcher is not None and seq.matcher.is_ready:
                del self.waiting_for_grammar[seq.seq_id]
                self.waiting.add(seq, is_first=True)

    def _preempt(self, seq: Sequence) -> None:
        """Release everything but the tokens; the sequence is recomputed when there is room."""
        self._leave_running(seq)
        self.waiting.add(seq, is_first=True)
        self.num_preemptions += 1

    def _admit_waiting(self, step: Step) -> None:
        while step.budget and self._free_slots:
            seq = self.waiting.first(step.unfinished) or self.waiting.first()
            if seq is None:
                return
            misfit, num_needed = self._misfit
            if seq is misfit and self.blocks.num_free < num_needed:
                return
            if not self.allow_chunks and len(seq.token_ids) > step.budget:
                return
            if seq.num_pending:  # preempted, and its last token is not known to the host yet
                return
            if (num_needed := self.blocks.admit(seq) or 0) > 0:
                self._misfit = seq, num_needed
                return
            self._misfit = None, 0
            self.waiting.remove(seq)
            self._enter_running(seq, step)

    def _enter_running(self, seq: Sequence, step: Step) -> None:
        seq.slot = self._free_slots.pop()
        seq.start_time = seq.start_time or time.perf_counter()
        is_last = not self.running or seq.priority >= self._last_running.priority
        self.running[seq.seq_id] = seq
        if not is_last:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].priority))
        if len(seq.token_ids) == seq.num_prompt_tokens:
            seq.num_cached = seq.num_computed
            self.num_cache_queries += seq.num_prompt_tokens
            self.num_cache_hits += seq.num_cached
        copy, seq.leader = self.blocks.copy_on_write(seq), None
        if copy is not None:
            step.block_copies.append(copy)
        if self.states is not None:
            self.states.enter(seq)
        token_ids = np.array(seq.token_ids, np.int32)
        step.new_rows.append(
            NewRow(
                seq.slot,
                token_ids,
                list(seq.block_ids),
                seq.num_prompt_tokens,
                seq.request.params,
                seq.request.seed,
                seq.stop_token_ids,
                seq.request.bad_words,
                seq.request.pooling,
            )
        )
        # A prompt that does not fit takes the rest of the budget, unless a snapshot is due earlier.
        self._add_row(step, seq, self._row_end(seq, step))
        seq.row_start = 0

    def _row_end(self, seq: Sequence, step: Step) -> int:
        budget = step.budget
        if budget < seq.num_tokens - seq.num_computed and self._must_share(seq, step):
            budget -= budget // 2
        end = min(seq.num_tokens, seq.num_computed + budget)
        return end if self.states is None else self.states.row_end(seq, end)

    def _must_share(self, seq: Sequence, step: Step) -> bool:
        """Whether a request of several prompts leaves half of the step to another request."""
        if self.prompt_budget is None or not self.waiting.has_more(seq):
            return False
        other = self.waiting.first((*step.unfinished, seq.request_id))
        return other is not None and other.priority <= seq.priority

    def _add_row(
        self, step: Step, seq: Sequence, end: int, drafts: list[int] | None = None
    ) -> None:
        """Schedule `seq` up to `end`; if all tokens run, also count the one to be sampled.

        Draft tokens run after `end`, but are counted only when `commit` has verified them.
        """
        start = seq.num_computed
        is_last = end == seq.num_tokens
        step.rows.append(seq)
        step.slots.append(seq.slot)
        step.starts.append(start)
        count, num_logits = end - start, seq.num_logits if is_last else 0
        if drafts or seq.has_rejected:
            drafts = drafts or []
            step.draft_updates.append(DraftUpdate(seq.slot, end, drafts))
            seq.drafts, seq.has_rejected = drafts, False
            count, num_logits = count + len(drafts), num_logits + len(drafts)
        step.counts.append(count)
        step.num_logits.append(num_logits)
        if is_last and seq.matcher is not None:
            step.masked_rows.append(len(step.rows) - 1)
        if is_last and start >= seq.num_prompt_tokens:
            step.num_decode_tokens += count
        step.budget -= count
        seq.row_start, seq.num_computed = start, end
        if is_last:
            seq.num_tokens += 1
        else:
            step.unfinished.add(seq.request_id)
        if end >= seq.next_full_len:
            self.blocks.register(seq)
        if self.states is not None:
            self.states.scheduled(seq)
        if seq.followers and end >= seq.num_prompt_tokens:
            self._prefilled_leaders.append(seq)

    def _add_columns(
        self, rows: list[Sequence], plan: StepPlan, columns: Mapping[str, npt.NDArray[Any]]
    ) -> list[Sequence]:
        """Store logprobs and pooled vectors in their sequences; return those that they end."""
        from nanovllm.engine.logprobs import add_logprobs
        from nanovllm.engine.scoring import add_pooled

        add_logprobs(rows, plan, columns)
        ended = add_pooled(rows, plan, columns.get("pooled"))
        for seq, reason in ended:
            self._end(seq, reason)
        return [seq for seq, _ in ended]

    def _append_verified(self, step: Step, seq: Sequence, token_ids: list[int]) -> None:
        """Append the draft tokens that the step accepted, and the token sampled after them."""
        num_drafts, num_accepted = len(seq.drafts), len(token_ids) - 1
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
        assert self.drafter is not None
        self.drafter.verified(seq, num_drafts, num_accepted)
        for counts in (self.drafter.counts, seq.draft_counts):
            counts.add(num_drafts, num_kept)
        step.num_accepted += num_kept
        step.num_rejected += num_drafts - num_kept

    def _append(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token, and end the sequence if the token completes it."""
        if token_id == NO_TOKEN:
            self._end(seq, "error")
            return
        seq.token_ids.append(token_id)
        num_tokens = len(seq.token_ids)
        if num_tokens == seq.num_prompt_tokens + 1 and seq.request.params.max_tokens != 0:
            seq.first_token_time = time.perf_counter()
        if seq.num_computed >= seq.next_full_len:
            self.blocks.register(seq)
        matcher = seq.matcher
        if token_id in seq.stop_token_ids or (matcher and matcher.finishes(token_id)):
            self._end(seq, "stop")
        elif num_tokens >= seq.max_len:
            self._end(seq, "length")

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if self.drafter is not None:
            self.drafter.finished(seq)
        if seq.followers:
            self._enqueue_followers(seq)
        if seq.leader is not None and seq.seq_id in seq.leader.followers:
            del seq.leader.followers[seq.seq_id]
        elif seq.seq_id in self.waiting_for_grammar:
            del self.waiting_for_grammar[seq.seq_id]
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
