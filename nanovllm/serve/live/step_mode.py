"""Step mode: compare snapshots to find the changes that each step of a paused engine made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from nanovllm.engine.block_manager import NO_BLOCK, BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.feature import Feature
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepResult
from nanovllm.serve.live.engine_state import Change, EngineState, PausedState

NUM_PROMPT_TOKENS = 24  # number of leading tokens shown for each prompt
# Kind of change -> function that makes it, in the order in which a step makes the changes.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "queued": Scheduler.add,
    "preempted": Scheduler.schedule,
    "postponed": Scheduler.retract,
    "admitted": Scheduler.schedule,
    "shared": BlockManager.admit,
    "evicted": BlockManager.allocate,
    "allocated": BlockManager.allocate,
    "scheduled": Scheduler.schedule,
    "registered": BlockManager.register,
    "sampled": Scheduler.commit,
    "finished": Scheduler.commit,
    "freed": BlockManager.release,
}


class StepMode:
    """State of a paused engine: the number of steps left to run, and the previous snapshot."""

    def __init__(self, core: EngineCore) -> None:
        self.num_steps = 0  # number of steps to run before the engine pauses again
        self._core = core
        self._before: EngineState | None = None
        self._recorder = PlanRecorder(core.scheduler.blocks.block_size)
        core.scheduler.features += (self._recorder,)

    def end(self) -> None:
        scheduler = self._core.scheduler
        scheduler.features = tuple(each for each in scheduler.features if each != self._recorder)

    def explain(self, state: EngineState) -> EngineState:
        """Return the snapshot with the changes since the previous one and the tokens to show."""
        plans, self._recorder.plans = self._recorder.plans, []
        changes: list[Change] = []
        # While no client was subscribed, several plans may have run; `compare` handles only one.
        if self._before is not None and len(plans) <= 1:
            changes = compare(self._before, state, plans[0] if plans else [])
        self._before = state
        scheduler = self._core.scheduler
        waiting = chain(scheduler.waiting, scheduler.postponed.values())
        prompts = {
            seq.seq_id: seq.token_ids[:NUM_PROMPT_TOKENS].tolist()
            for seq in chain(scheduler.running.values(), waiting)
        }
        return replace(state, paused=PausedState(changes, self._block_tokens(), prompts))

    def _block_tokens(self) -> dict[int, list[int]]:
        blocks = self._core.scheduler.blocks
        size = blocks.block_size
        found: dict[int, list[int]] = {
            block_id: np.frombuffer(prefix.key.tokens, np.int32).tolist()
            for prefix in blocks.cached.values()
            for block_id in prefix.block_ids
            if block_id != NO_BLOCK
        }
        for seq in self._core.scheduler.running.values():
            for table in seq.tables:
                for index, block_id in enumerate(table.held_block_ids, table.first):
                    found[block_id] = seq.token_ids[index * size : (index + 1) * size].tolist()
        return found


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row of a plan, with the state of its sequence when the plan was made."""

    seq_id: int
    slot: int
    start: int  # position of the first token
    count: int  # number of tokens
    is_new: bool  # whether the plan admits the sequence
    kind: str  # "prefill", "decode", or "recompute" after a preemption
    block_ids: list[int]
    cached_ids: list[int]  # those of the tokens before `start`
    token_ids: list[int] = field(default_factory=list)  # sampled tokens, once the step has run


class PlanRecorder(Feature):
    """Records the rows of the last two plans."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # Rows of the plans since the last snapshot; only the last two plans are kept.
        self.plans: list[list[PlannedRow]] = []
        self._in_flight: deque[tuple[Step, list[PlannedRow]]] = deque(maxlen=2)

    def planned(self, step: Step) -> None:
        new_slots = {row.slot for row in step.new_rows}
        columns = step.rows, step.starts, step.counts, step.num_logits
        rows = [
            PlannedRow(
                seq.seq_id,
                seq.slot,
                start,
                count,
                seq.slot in new_slots,
                _kind(seq, start, count - max(num_logits - 1, 0)),
                seq.held_block_ids,
                _blocks_before(seq, start // self._block_size),
            )
            for seq, start, count, num_logits in zip(*columns, strict=True)
        ]
        self.plans = [*self.plans[-1:], rows]
        self._in_flight.append((step, rows))

    def committed(self, step: Step, result: StepResult) -> None:
        rows = next((rows for each, rows in self._in_flight if each is step), [])
        token_ids = iter(result.tokens.tolist())
        num_valid = step.num_logits if result.num_valid is None else result.num_valid.tolist()
        dropped = {seq.seq_id for seq in step.dropped}
        for row, count, valid in zip(rows, step.num_logits, num_valid, strict=False):
            new = list(islice(token_ids, count))[:valid]
            row.token_ids.extend(new if row.seq_id not in dropped else [])


def compare(before: EngineState, after: EngineState, rows: list[PlannedRow]) -> list[Change]:
    """Return the changes between two snapshots; at most one plan may have run between them."""
    changes = chain(_sequence_changes(before, after, rows), _block_changes(before, after, rows))
    order = list(FUNCTIONS)
    return sorted(changes, key=lambda change: order.index(change.kind))


def _blocks_before(seq: Sequence, end: int) -> list[int]:
    """Return the blocks that a sequence holds in front of index `end` of its tables."""
    return [each for table in seq.tables for each in table.block_ids[table.first : end]]


def _kind(seq: Sequence, start: int, count: int) -> str:
    if count == 1 and start >= seq.num_prompt_tokens:
        return "decode"
    return "prefill" if len(seq.token_ids) == seq.num_prompt_tokens else "recompute"


def _sequence_changes(
    before: EngineState, after: EngineState, rows: list[PlannedRow]
) -> Iterator[Change]:
    statuses = {seq.seq_id: seq.status for seq in after.sequences}
    for seq_id in set(after.queue).difference(seq.seq_id for seq in before.sequences):
        # A snapshot shows only the head of a long queue, so the sequence may not be new.
        if len(before.queue) == before.stats.num_waiting:
            yield _change("queued", seq_id)
    admitted = {row.seq_id for row in rows if row.is_new}
    for seq_id in _running(before):
        if statuses.get(seq_id) == "postponed":
            yield _change("postponed", seq_id, note="waits for its bitmask")
        elif statuses.get(seq_id, "running") != "running" or seq_id in admitted:
            yield _change("preempted", seq_id, note="back to the head of the queue")
    for row in rows:
        if row.is_new:
            yield _change("admitted", row.seq_id, note=f"to slot {row.slot}")
        last = row.start + row.count - 1
        where = f"position {last}" if row.count == 1 else f"positions {row.start} to {last}"
        yield _change("scheduled", row.seq_id, note=f"{row.kind}, {where}")
        if row.token_ids:
            yield _change("sampled", row.seq_id, token_ids=row.token_ids)
    for end in after.ended:
        yield _change("finished", end.seq_id, note=f"finish_reason {end.reason}")


def _block_changes(
    before: EngineState, after: EngineState, rows: list[PlannedRow]
) -> Iterator[Change]:
    tables, kept = _running(before), _running(after)
    left = dict(tables)  # blocks that a sequence held, and may have freed
    taken: set[int] = set()  # blocks allocated by the plan
    for row in rows:
        known = tables.get(row.seq_id, [])
        if row.is_new:
            known = row.cached_ids
            if known:
                is_filled = all(before.cached[i] and i not in taken for i in known)
                note = "computed in an earlier step" if is_filled else "filled in this step"
                yield _change("shared", row.seq_id, known, note)
        new_ids = [block_id for block_id in row.block_ids if block_id not in known]
        if new_ids:
            yield _change("allocated", row.seq_id, new_ids)
        taken.update(new_ids)
        if row.seq_id not in kept:
            left[row.seq_id] = [*left.get(row.seq_id, []), *row.block_ids]
    # A block may be freed by one sequence and allocated by another in the same step.
    held = set(chain.from_iterable(kept.values())) - taken
    for seq_id, block_ids in left.items():
        if freed := [each for each in dict.fromkeys(block_ids) if each not in held]:
            yield _change("freed", seq_id, freed)
    flags = list(enumerate(zip(before.cached, after.cached, strict=True)))
    evicted = [i for i, (was, is_now) in flags if was and (not is_now or i in taken)]
    registered = [i for i, (was, is_now) in flags if is_now and (not was or i in taken)]
    if evicted:
        yield _change("evicted", None, evicted, "no longer in the prefix cache")
    if registered:
        yield _change("registered", None, registered, "now in the prefix cache")


def _running(state: EngineState) -> dict[int, list[int]]:
    """Return the block tables of the running sequences."""
    return {seq.seq_id: seq.held_block_ids for seq in state.sequences if seq.status == "running"}


def _change(
    kind: str,
    seq_id: int | None,
    block_ids: Iterable[int] = (),
    note: str = "",
    token_ids: Iterable[int] = (),
) -> Change:
    function = FUNCTIONS[kind]
    where = f"{function.__module__.replace('.', '/')}.py::{function.__qualname__}"
    return Change(kind, where, seq_id, list(block_ids), note, list(token_ids))
