"""Scheduling on a fake device: sharing, preemption, limits, failures, cost per step."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.feature import Feature
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.errors import EngineError, RequestError
from nanovllm.sampling_params import NO_TOKEN, SamplingParams
from tests.engine.watched import Watched, add
from tests.fake_executor import EOS, VOCAB_SIZE, Done, FakeExecutor, predict, reference

SIZE = 4
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def make_core(
    num_blocks: int = 32,
    *,
    num_slots: int = 8,
    budget: int = 1000,
    caching: bool = True,
    depth: int = 0,
    max_model_len: int = 1000,
    executor: type[FakeExecutor] = FakeExecutor,
) -> EngineCore:
    scheduler = Scheduler(BlockManager(num_blocks, SIZE, caching), num_slots, budget)
    return EngineCore(scheduler, executor(num_blocks, SIZE), depth, max_model_len)


def make_seq(seq_id: int, prompt: list[int], max_tokens: int = 5, **options: Any) -> Watched:
    """Return a sequence that ends only at its maximum length."""
    return Watched(seq_id, prompt, SamplingParams(max_tokens=max_tokens), **options)


def endless(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what the fake device generates if nothing stops it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(predict(tokens))
    return tokens[len(prompt) :]


def step(core: EngineCore) -> None:
    core.step()
    core.scheduler.check()


def drain(core: EngineCore, limit: int = 1000) -> None:
    """Run to the end, including steps that are left in flight."""
    for _ in range(limit):
        if not core.has_unfinished and not core._in_flight:
            break
        step(core)
    else:
        pytest.fail("stuck")
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_blocks


def run(core: EngineCore, *sequences: Watched) -> list[list[int]]:
    for seq in sequences:
        add(core, seq)
    drain(core)
    return [seq.output_token_ids for seq in sequences]


def plans(core: EngineCore) -> list[StepPlan]:
    assert isinstance(core.executor, FakeExecutor)
    return core.executor.plans


@DEPTHS
def test_identical_prompts_of_one_step_share_their_full_blocks(depth: int) -> None:
    core, prompt = make_core(depth=depth), [*range(1, 11)]
    sequences = [make_seq(i, prompt) for i in range(3)]
    for seq in sequences:
        add(core, seq)
    step(core)
    first = plans(core)[0]
    assert first.counts.tolist() == [10, 2, 2]
    tables = [row.tables[0] for row in first.new_rows]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    drain(core)
    assert [seq.output_token_ids for seq in sequences] == [endless(prompt, 5)] * 3
    assert [seq.num_cached for seq in sequences] == [0, 8, 8]


@DEPTHS
def test_a_wholly_cached_prompt_still_computes_and_samples(depth: int) -> None:
    core, prompt = make_core(depth=depth), [*range(1, 9)]  # exactly two blocks
    run(core, make_seq(0, prompt))
    num_plans = len(plans(core))
    again = make_seq(1, prompt)
    assert run(core, again) == [endless(prompt, 5)]
    plan = plans(core)[num_plans]
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([4], [4])
    assert plan.num_logits.tolist() == [1]
    assert again.num_cached == 4


@DEPTHS
def test_a_sharer_waits_for_a_writer_that_the_budget_cuts_short(depth: int) -> None:
    """The fake device reads back what blocks hold, so sharing too early would change tokens."""
    core, prompt = make_core(depth=depth, budget=6), [*range(1, 18)]
    sequences = [make_seq(i, prompt) for i in range(3)]
    assert run(core, *sequences) == [endless(prompt, 5)] * 3
    assert all(plan.counts.sum() <= 6 for plan in plans(core))
    assert sum(seq.num_cached for seq in sequences) > 0


@DEPTHS
@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_writer_of_a_shared_block_leaves_before_commit(
    depth: int, how: str, num_steps: int
) -> None:
    core, prompt = make_core(depth=depth), [*range(1, 15)]
    writer, sharer = make_seq(0, prompt), make_seq(1, [*prompt, 3])
    add(core, writer)
    add(core, sharer)
    for _ in range(num_steps):
        step(core)
    assert sharer.num_cached == 12
    if how == "abort":
        core.finish(writer.seq_id, "abort")
    else:
        core.scheduler._preempt(writer.sequence)
    core.scheduler.check()
    late = make_seq(2, [*prompt, 7])
    add(core, late)
    drain(core)
    assert sharer.output_token_ids == endless([*prompt, 3], 5)
    assert late.output_token_ids == endless([*prompt, 7], 5)
    assert late.num_cached == 12
    want = endless(prompt, 5)
    if how == "abort":
        want = want[: len(writer.output_token_ids)]
    assert writer.output_token_ids == want


@DEPTHS
def test_a_preempted_sequence_hits_the_cache_on_its_way_back(depth: int) -> None:
    core = make_core(num_blocks=8, depth=depth)
    old, new = make_seq(0, [*range(1, 10)], 20), make_seq(1, [*range(9, 0, -1)], 20)
    got = run(core, old, new)
    assert got == [endless([*range(1, 10)], 20), endless([*range(9, 0, -1)], 20)]
    assert core.scheduler.num_preemptions > 0
    returns = [
        (row, plan.starts[plan.slots.tolist().index(row.slot)])
        for plan in plans(core)
        for row in plan.new_rows
        if len(row.token_ids) > row.num_prompt_tokens
    ]
    assert returns
    for row, start in returns:
        assert row.num_prompt_tokens == 9
        assert start >= SIZE
    assert new.num_cached == 0  # blocks of a resumed sequence do not count as prompt hits


@DEPTHS
def test_who_came_first_is_served_first(depth: int) -> None:
    """The newest sequence is preempted, and resumes before those that arrived later."""
    core = make_core(num_blocks=9, num_slots=3, depth=depth, caching=False)
    sequences = [make_seq(i, [i + 1] * 11, 12) for i in range(5)]
    for seq in sequences:
        add(core, seq)
    while core.has_unfinished:
        step(core)
        order = [*core.scheduler.running, *(seq.seq_id for seq in core.scheduler.waiting)]
        assert order == sorted(order)
    drain(core)
    assert core.scheduler.num_preemptions > 2
    assert [seq.output_token_ids for seq in sequences] == [
        endless([i + 1] * 11, 12) for i in range(5)
    ]


@DEPTHS
@pytest.mark.parametrize("priorities", [[0, 0, -1, 5, 1], [3, 2, 1, 0, -1], [1, 1, 1, 0, 0]])
def test_a_lower_priority_is_served_first(depth: int, priorities: list[int]) -> None:
    """Waiting sequences are admitted by priority; the highest number is preempted, newest first."""
    core = make_core(num_blocks=9, num_slots=3, depth=depth, caching=False)
    params = [SamplingParams(max_tokens=12, priority=priority) for priority in priorities]
    sequences = [Watched(i, [i + 1] * 11, param) for i, param in enumerate(params)]
    for seq in sequences:
        add(core, seq)
    ended: list[int] = []
    while core.has_unfinished:
        ended += [finished_seq.seq_id for finished_seq in core.step().finished]
        core.scheduler.check()
        running = [seq.priority for seq in core.scheduler.running.values()]
        waiting = [seq.priority for seq in core.scheduler.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
    drain(core)
    assert core.scheduler.num_preemptions > 2
    assert [priorities[i] for i in ended] == sorted(priorities)
    assert [seq.output_token_ids for seq in sequences] == [
        endless([i + 1] * 11, 12) for i in range(5)
    ]


def test_who_comes_late_with_a_lower_priority_does_not_wait_for_the_head() -> None:
    core = make_core(num_blocks=8)
    add(core, make_seq(0, [1] * 20, max_tokens=8))
    add(core, make_seq(1, [2] * 25, max_tokens=2))  # needs more blocks than are free
    step(core)
    add(core, Watched(2, [3] * 4, SamplingParams(max_tokens=2, priority=-1)))
    step(core)
    assert 2 in core.scheduler.running


@DEPTHS
def test_growth_past_the_pool_ends_with_length(depth: int) -> None:
    core = make_core(num_blocks=4, depth=depth)
    seq = make_seq(0, [1, 2, 3, 4, 5], max_tokens=500)
    assert run(core, seq) == [endless([1, 2, 3, 4, 5], 11)]
    assert seq.finish_reason == "length"
    assert len(seq.token_ids) == 16


@DEPTHS
def test_growth_past_max_model_len_ends_with_length(depth: int) -> None:
    core = make_core(max_model_len=10, depth=depth)
    seq = make_seq(0, [1, 2, 3], max_tokens=500)
    assert run(core, seq) == [endless([1, 2, 3], 7)]
    assert seq.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "length", "limit"),
    [
        ({"num_blocks": 4}, 16, 15),
        ({"num_blocks": 4}, 500, 15),
        ({"max_model_len": 10}, 10, 9),
    ],
)
def test_a_prompt_that_can_never_fit_is_refused_at_once(
    options: dict[str, int], length: int, limit: int
) -> None:
    core = make_core(**options)
    with pytest.raises(RequestError, match=rf"{length} tokens.*\b{limit} fit"):
        add(core, make_seq(0, [1] * length))
    assert not core.has_unfinished
    core.scheduler.check()
    assert core.step() == EngineCoreOutputs([], [], [])
    fitting = make_seq(1, [1] * limit)
    assert run(core, fitting) == [endless([1] * limit, 1)]


@DEPTHS
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_smaller_than_the_number_of_rows(depth: int, budget: int) -> None:
    core = make_core(depth=depth, budget=budget)
    prompts = [[i + 1] * (i + 1) for i in range(6)]
    got = run(core, *(make_seq(i, prompt) for i, prompt in enumerate(prompts)))
    assert got == [endless(prompt, 5) for prompt in prompts]
    assert all(1 <= plan.counts.sum() <= budget for plan in plans(core))


@DEPTHS
def test_more_sequences_than_slots(depth: int) -> None:
    core = make_core(depth=depth, num_slots=2)
    prompts = [[i + 1] * 3 for i in range(7)]
    got = run(core, *(make_seq(i, prompt) for i, prompt in enumerate(prompts)))
    assert got == [endless(prompt, 5) for prompt in prompts]
    assert max(len(plan.slots) for plan in plans(core)) == 2
    assert {slot for plan in plans(core) for slot in plan.slots.tolist()} == {0, 1}


@DEPTHS
def test_the_row_after_a_late_stop_is_dropped(depth: int) -> None:
    """At depth > 0, steps are in flight when EOS becomes known; their tokens are discarded."""
    core = make_core(depth=depth)
    prompts = [[i, i + 1] for i in range(1, 20)]
    sequences = [
        make_seq(i, prompt, 40, stop_token_ids=frozenset({EOS})) for i, prompt in enumerate(prompts)
    ]
    assert run(core, *sequences) == [reference(prompt, 40) for prompt in prompts]
    assert {seq.finish_reason for seq in sequences} == {"stop", "length"}


@DEPTHS
def test_no_row_runs_past_max_tokens(depth: int) -> None:
    """The length is known when a step is planned, so no computation is wasted."""
    core = make_core(depth=depth, caching=False)
    assert len(run(core, make_seq(0, [1, 2, 3], max_tokens=1))[0]) == 1
    run(core, make_seq(1, [1, 2, 3], max_tokens=6))
    assert sum(int(plan.counts.sum()) for plan in plans(core)) == 3 + (3 + 5)


@DEPTHS
def test_prefill_and_decode_are_counted_exactly(depth: int) -> None:
    """Every prompt token counts as prefill, even a single one; every later token as decode."""
    core = make_core(depth=depth, budget=7, caching=False)
    lengths = [1, 1, 2, 6, 7, 8, 15]
    for i, length in enumerate(lengths):
        add(core, make_seq(i, [i + 1] * length))
    num_prefill = num_decode = 0
    while core.has_unfinished:
        result = core.step()
        num_prefill += result.num_prefill_tokens
        num_decode += result.num_decode_tokens
    assert (num_prefill, num_decode) == (sum(lengths), 4 * len(lengths))


def test_finish_of_waiting_running_and_unknown_sequences() -> None:
    core = make_core(num_slots=1)
    running, waiting = make_seq(0, [1, 2, 3]), make_seq(1, [4, 5, 6])
    add(core, running)
    add(core, waiting)
    step(core)
    finished = [core.finish(seq_id, "abort") for seq_id in (1, 1, 77, 0)]
    assert [
        finished_seq and (finished_seq.seq_id, len(finished_seq.token_ids))
        for finished_seq in finished
    ] == [
        (1, 0),
        None,
        None,
        (0, 1),
    ]
    assert running.finish_reason == waiting.finish_reason == "abort"
    drain(core)


@DEPTHS
def test_streaming_sequences_report_every_token_and_all_report_their_ending(depth: int) -> None:
    core = make_core(depth=depth)
    streams, plain = (
        [make_seq(i, [i + 1] * 3, 4, is_streaming=True) for i in (0, 1)],
        make_seq(2, [9]),
    )
    for watched in (*streams, plain):
        add(core, watched)
    got: dict[int, list[int]] = {0: [], 1: []}
    finished = {}
    while core.has_unfinished:
        result = core.step()
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            got[seq_id].append(token_id)
        finished |= {finished_seq.seq_id: finished_seq for finished_seq in result.finished}
    assert got == {0: endless([1] * 3, 4), 1: endless([2] * 3, 4)}
    assert {i: finished_seq.token_ids for i, finished_seq in finished.items()} == got | {
        2: endless([9], 5)
    }
    assert {finished_seq.finish_reason for finished_seq in finished.values()} == {"length"}
    for watched in (*streams, plain):
        finished_seq = finished[watched.seq_id]
        assert watched.request.arrival_time < finished_seq.first_token_time < finished_seq.end_time


class Broken(FakeExecutor):
    """Fails to sample the second token of the sequence in slot 0."""

    def submit(self, plan: StepPlan) -> Done:
        result = super().submit(plan).value
        is_broken = (plan.slots == 0) & (plan.starts == 3)
        return Done(StepResult(np.where(is_broken, NO_TOKEN, result.tokens)))


@DEPTHS
def test_a_row_without_a_token_ends_in_an_error_and_no_other_does(depth: int) -> None:
    core = make_core(depth=depth, executor=Broken)
    broken, other = make_seq(0, [1, 2, 3], is_streaming=True), make_seq(1, [4, 5, 6])
    add(core, broken)
    add(core, other)
    streamed, finished = [], {}
    while core.has_unfinished:
        result = core.step()
        streamed += result.token_ids
        finished |= {finished_seq.seq_id: finished_seq for finished_seq in result.finished}
    drain(core)
    assert streamed == finished[0].token_ids == endless([1, 2, 3], 1)
    assert finished[1].token_ids == endless([4, 5, 6], 5)
    assert [finished[i].finish_reason for i in (0, 1)] == ["error", "length"]


@DEPTHS
def test_rows_come_in_the_order_of_admission(depth: int) -> None:
    def run_once() -> list[tuple[list[int], list[int], list[int]]]:
        core = make_core(num_blocks=14, depth=depth, budget=9, num_slots=5)
        for i in range(12):
            add(core, make_seq(i, [i % VOCAB_SIZE] * (1 + i % 7), 6))
        drain(core)
        assert all(len(set(plan.slots.tolist())) == len(plan.slots) for plan in plans(core))
        return [(p.slots.tolist(), p.starts.tolist(), p.counts.tolist()) for p in plans(core)]

    assert run_once() == run_once()
    core = make_core(depth=depth)
    for i in (3, 1, 2, 0):
        add(core, make_seq(i, [i + 1] * 3))
    step(core)
    assert list(core.scheduler.running) == [3, 1, 2, 0]
    first_tokens = [row.token_ids[0] for row in plans(core)[0].new_rows]
    assert first_tokens == [4, 2, 3, 1]
    assert plans(core)[0].slots.tolist() == [row.slot for row in plans(core)[0].new_rows]


def test_a_head_that_does_not_fit_costs_nothing_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(num_blocks=20)
    add(core, make_seq(0, [1] * 30, max_tokens=20))
    step(core)
    hashes, admissions = [], []
    real_hash, real_admit = xxhash.xxh3_64_intdigest, core.scheduler.blocks.admit
    monkeypatch.setattr(
        "xxhash.xxh3_64_intdigest", lambda *args: hashes.append(args) or real_hash(*args)
    )
    monkeypatch.setattr(
        core.scheduler.blocks, "admit", lambda *args: admissions.append(args) or real_admit(*args)
    )
    late = make_seq(1, [2] * 60, max_tokens=3)
    add(core, late)
    step(core)
    assert len(admissions) == 1
    assert len(hashes) == 14 + 1  # the blocks and the salt
    for _ in range(10):
        step(core)
    assert core.scheduler.waiting
    assert len(admissions) == 1
    running_blocks = 10 // SIZE + 1  # filled by the running sequence in the meantime
    assert len(hashes) <= 15 + running_blocks
    drain(core)
    assert late.output_token_ids == endless([2] * 60, 3)
    assert len(admissions) == 2


def test_an_overtaken_sequence_that_did_not_fit_is_counted_again() -> None:
    core, prefix = make_core(num_blocks=21), list(range(1, 49))
    add(core, make_seq(0, [50] * 28, max_tokens=4))
    add(core, make_seq(1, [*prefix, *[51] * 12], max_tokens=2))  # needs more blocks than are free
    step(core)
    assert 1 not in core.scheduler.running
    overtaking = Watched(2, [*prefix, 52, 52], SamplingParams(max_tokens=12, priority=-1))
    add(core, overtaking)
    while 0 in core.scheduler.running:
        step(core)
    assert 2 in core.scheduler.running
    step(core)
    assert 1 in core.scheduler.running  # it shares the blocks of the prefix
    drain(core)


def test_a_cancelled_head_makes_room_for_the_next() -> None:
    core = make_core(num_blocks=8)
    add(core, make_seq(0, [1] * 20, max_tokens=8))
    add(core, make_seq(1, [2] * 25, max_tokens=2))  # needs more blocks than are free
    small = make_seq(2, [3] * 4, max_tokens=2)
    add(core, small)
    step(core)
    assert [seq.seq_id for seq in core.scheduler.waiting] == [1, 2]
    core.finish(1, "abort")
    step(core)
    assert 2 in core.scheduler.running
    drain(core)


class Failing(FakeExecutor):
    def submit(self, plan: StepPlan) -> Done:
        if len(self.plans) == 2:
            raise RuntimeError("the device is gone")
        return super().submit(plan)


def test_a_request_that_a_feature_refuses_leaves_nothing() -> None:
    class Refusing(Feature):
        def joins(self, seq: Sequence) -> bool:
            raise RequestError("not this one")

    core = make_core()
    core.scheduler.features = (Refusing(),)
    with pytest.raises(RequestError, match="not this one"):
        add(core, make_seq(0, [1, 2, 3]))
    assert not core.has_unfinished


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_device_fails_every_later_call_with_its_cause(depth: int) -> None:
    core = make_core(depth=depth, executor=Failing)
    add(core, make_seq(0, [1, 2, 3]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        drain(core)
    with pytest.raises(EngineError) as step_error:
        core.step()
    assert "the device is gone" in str(step_error.value)
    with pytest.raises(EngineError):
        add(core, make_seq(1, [1, 2, 3]))
    assert core.finish(0, "abort") is not None


def count_lines(core: EngineCore, num_steps: int) -> int:
    """Count the lines of engine code that some steps execute: a measure without jitter."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if "nanovllm" not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(num_steps):
            core.step()
    finally:
        sys.settrace(previous)
    return num_lines


class Instant(FakeExecutor):
    """Samples a constant, so that only scheduling takes time."""

    def submit(self, plan: StepPlan) -> Done:
        return Done(StepResult(plan.num_logits[plan.num_logits > 0]))


def decoding_core(num_rows: int, prompt_len: int = 3, num_waiting: int = 0) -> EngineCore:
    core = make_core(
        num_blocks=(num_rows + 1) * (prompt_len + 64),
        num_slots=num_rows,
        budget=100_000,
        max_model_len=100_000,
        executor=Instant,
    )
    for i in range(num_rows + num_waiting):
        add(core, make_seq(i, [i % 90] * prompt_len, 200))
    core.step()
    return core


def test_a_step_costs_the_same_for_every_row() -> None:
    few, many = (count_lines(decoding_core(n), 8) for n in (32, 256))
    assert 7.0 < many / few < 8.5


def test_a_step_does_not_pay_for_waiting_sequences() -> None:
    assert count_lines(decoding_core(16), 8) == count_lines(decoding_core(16, num_waiting=2000), 8)


def test_a_step_does_not_pay_for_the_length_of_a_sequence() -> None:
    assert count_lines(decoding_core(16, 83), 8) == count_lines(decoding_core(16, 803), 8)


def test_a_prompt_in_chunks_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = xxhash.xxh3_64_intdigest
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda *args: calls.append(1) or real(*args))
    core = make_core(num_blocks=64, budget=3)
    run(core, make_seq(0, [1] * 200, 5))
    assert len(plans(core)) > 60
    assert len(calls) <= 204 // SIZE + 1
