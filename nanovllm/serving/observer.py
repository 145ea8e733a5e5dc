"""Looks at a core while somebody watches, and tells what changed at most twenty times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from nanovllm.engine.request import Ending
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.base import Executor
from nanovllm.pending import Pending
from nanovllm.serving.core_records import CoreStats
from nanovllm.serving.state_records import (
    EngineChange,
    EngineNews,
    EngineState,
    SequenceEnd,
    SequenceState,
    Status,
    StepState,
)

SECONDS_BETWEEN = 0.05
MAX_QUEUE = 64  # sequences of the queue that are shown


@dataclass(slots=True)
class Shown:
    """What the watchers know of a sequence."""

    status: Status
    block_ids: list[int]  # the sequence's own list: another one means that it left the batch
    num_blocks: int
    num_computed: int
    num_tokens: int


class Observer:
    """One for each time that watching begins; `close` ends it."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.timer = StepTimer(clock)
        self._scheduler, self._clock = scheduler, clock
        self._shown: dict[int, Shown] = {}
        self._cached = NotedTable(scheduler.blocks.cached)
        scheduler.blocks.cached = self._cached
        self._queue: list[int] = []
        self._ended: list[SequenceEnd] = []
        self._stats: CoreStats | None = None  # of the last news; None: a snapshot is due
        self._last_time = -SECONDS_BETWEEN
        self._is_late = True  # something may have changed since the last news

    def close(self) -> None:
        self._scheduler.blocks.cached = dict(self._cached)

    def restart(self) -> None:
        """Begin again with a snapshot: somebody joined, or lost the thread."""
        self._stats, self._is_late = None, True

    def seconds_to_news(self, at_most: float) -> float:
        """How long an idle core may sleep until there is something to tell."""
        if not self._is_late:
            return at_most
        return max(0.0, self._last_time + SECONDS_BETWEEN - self._clock())

    def end(self, endings: Iterable[Ending]) -> None:
        self._ended += [
            SequenceEnd(
                ending.seq_id,
                ending.finish_reason,
                len(ending.token_ids),
                _us(ending.start_time),
                _us(ending.first_token_time),
                _us(ending.end_time),
            )
            for ending in endings
        ]

    def news(self, stats: CoreStats) -> EngineNews | None:
        """Return what the watchers do not know; None when that is nothing, or it is too early."""
        now = self._clock()
        self._is_late = now - self._last_time < SECONDS_BETWEEN
        if self._is_late:
            return None
        news = self._state(stats, now) if self._stats is None else self._change(stats, now)
        if news is not None:
            self._stats, self._last_time = stats, now
        return news

    def _state(self, stats: CoreStats, now: float) -> EngineState:
        scheduler = self._scheduler
        self._cached.changes = {}
        self._shown, self._queue = {}, []
        sequences, _, _ = self._compare()
        steps, ended = self._take_past()
        return EngineState(
            scheduler.blocks.num_blocks,
            scheduler.blocks.block_size,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            sequences,
            self._queue,
            sorted(self._cached.values()),
            steps,
            ended,
            stats,
            _us(now),
        )

    def _change(self, stats: CoreStats, now: float) -> EngineChange | None:
        old_queue = self._queue
        sequences, progress, grown = self._compare()
        gone = self._forget_gone()
        queue = None if old_queue == self._queue else self._queue
        cached, uncached = self._cached.take_changes()
        steps, ended = self._take_past()
        has_changed = sequences or progress or gone or cached or uncached or steps or ended
        if not has_changed and queue is None and stats == self._stats:
            return None
        return EngineChange(
            sequences, progress, grown, gone, queue, cached, uncached, steps, ended, stats, _us(now)
        )

    def _take_past(self) -> tuple[list[StepState], list[SequenceEnd]]:
        """Return the steps and the ends since the last news."""
        steps, self.timer.steps = self.timer.steps, []
        ended, self._ended = self._ended, []
        return steps, ended

    def _compare(self) -> tuple[list[SequenceState], list[int], list[tuple[int, list[int]]]]:
        """Note how each sequence is that is to be shown; return which moved, went on and grew."""
        moved: list[SequenceState] = []
        progress: list[int] = []
        grown: list[tuple[int, list[int]]] = []
        for seq, status in self._to_show():
            shown = self._shown.get(seq.seq_id)
            if shown is None or shown.block_ids is not seq.block_ids or shown.status != status:
                moved.append(self._show(seq, status))
                continue
            num_computed, num_tokens = seq.num_computed, len(seq.token_ids)
            if num_computed != shown.num_computed or num_tokens != shown.num_tokens:
                shown.num_computed, shown.num_tokens = num_computed, num_tokens
                progress += (seq.seq_id, num_computed, num_tokens)
            if len(seq.block_ids) > shown.num_blocks:
                grown.append((seq.seq_id, seq.block_ids[shown.num_blocks :]))
                shown.num_blocks = len(seq.block_ids)
        return moved, progress, grown

    def _to_show(self) -> Iterator[tuple[Sequence, Status]]:
        scheduler = self._scheduler
        self._queue = []
        for seq in scheduler.running.values():
            yield seq, "running"
        for seq in islice(scheduler.waiting, MAX_QUEUE):
            self._queue.append(seq.seq_id)
            yield seq, "preempted" if seq.start_time else "waiting"
        for seq in islice(scheduler.postponed.values(), MAX_QUEUE):
            self._queue.append(seq.seq_id)
            yield seq, "postponed"

    def _show(self, seq: Sequence, status: Status) -> SequenceState:
        num_tokens = len(seq.token_ids)
        self._shown[seq.seq_id] = Shown(
            status, seq.block_ids, len(seq.block_ids), seq.num_computed, num_tokens
        )
        return SequenceState(
            seq.seq_id,
            status,
            seq.num_prompt_tokens,
            seq.max_len,
            seq.num_cached,
            seq.num_computed,
            num_tokens,
            _us(seq.request.arrival_time),
            list(seq.block_ids),
        )

    def _forget_gone(self) -> list[int]:
        running, queue = self._scheduler.running, set(self._queue)
        gone = [i for i in self._shown if i not in running and i not in queue]
        for seq_id in gone:
            del self._shown[seq_id]
        return gone


class NotedTable(dict[int, int]):
    """The table of cached blocks, by hash, that notes which blocks came and went."""

    def __init__(self, table: dict[int, int]) -> None:
        super().__init__(table)
        self.changes: dict[int, tuple[bool, bool]] = {}  # by block: whether it was there, and is

    def __setitem__(self, hash_: int, block_id: int) -> None:
        super().__setitem__(hash_, block_id)
        self._note(block_id, True)

    def __delitem__(self, hash_: int) -> None:
        self._note(self[hash_], False)
        super().__delitem__(hash_)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the blocks that are there anew, and those that are there no more."""
        changes, self.changes = self.changes, {}
        came = [block_id for block_id, (was, now) in changes.items() if now and not was]
        went = [block_id for block_id, (was, now) in changes.items() if was and not now]
        return came, went

    def _note(self, block_id: int, is_there: bool) -> None:
        was_there, _ = self.changes.get(block_id, (not is_there, is_there))
        self.changes[block_id] = was_there, is_there


class StepTimer:
    """Notes when the parts of each turn begin and end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: list[StepState] = []
        self._begin = self._last_result = 0.0
        self._submit: tuple[float, float] | None = None
        self._result: tuple[StepPlan, float, float, float] | None = None

    def begin(self) -> None:
        self._begin, self._submit, self._result = self.clock(), None, None

    def submitted(self, begin: float) -> None:
        self._submit = begin, self.clock()

    def has_result(self, plan: StepPlan, submitted: float, wait_begin: float) -> None:
        self._result = plan, max(submitted, self._last_result), wait_begin, self.clock()
        self._last_result = self._result[-1]

    def end(self) -> None:
        """Keep the turn, unless nothing was planned and nothing came."""
        now = self.clock()
        if self._submit is None and self._result is None:
            return
        plan, device_begin, wait, result = self._result or (None, 0.0, now, now)
        submit, submitted = self._submit or (wait, wait)
        self.steps.append(
            StepState(
                _us(self._begin),
                _us(submit - self._begin),
                _us(submitted - submit),
                _us(result - wait),
                _us(now - result),
                _us(device_begin),
                _us(result - device_begin) if plan is not None else 0,
                0 if plan is None else plan.num_prefill_tokens,
                0 if plan is None else plan.num_decode_tokens,
                0 if plan is None else len(plan.counts),
            )
        )


@dataclass(frozen=True, slots=True)
class TimedExecutor:
    """Tells a timer of every step; the core has it only while somebody watches."""

    executor: Executor
    timer: StepTimer

    def start(self) -> ExecutorInfo:
        return self.executor.start()

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        begin = self.timer.clock()
        pending = self.executor.submit(plan)
        self.timer.submitted(begin)
        return Pending(lambda: self._result(plan, pending, begin))

    def sample(self, masks: IntColumn) -> None:
        self.executor.sample(masks)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return self.executor.mask_memory(num_rows, num_words)

    def capture_one(self) -> bool:
        return self.executor.capture_one()

    def close(self) -> None:
        self.executor.close()

    def _result(self, plan: StepPlan, pending: Pending[StepResult], submitted: float) -> StepResult:
        wait_begin = self.timer.clock()
        result = pending.result()
        self.timer.has_result(plan, submitted, wait_begin)
        return result


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
