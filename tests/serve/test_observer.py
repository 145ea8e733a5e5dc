"""Snapshots show the scheduler's state at most ten times per second, and include every step."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import FinishedSequence, Request
from nanovllm.engine.timing import StepLog
from nanovllm.errors import EngineError
from nanovllm.parallel.child import StepTimer
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import core_process
from nanovllm.serve.core_messages import (
    AddRequests,
    CoreStats,
    CoreUpdate,
    FinishSequence,
    SendSnapshots,
)
from nanovllm.serve.core_process import IDLE_SECONDS, Command, CoreLoop
from nanovllm.serve.live import observer
from nanovllm.serve.live.engine_state import EngineState
from nanovllm.serve.live.observer import SNAPSHOT_SECONDS, Observer
from nanovllm.serve.live.snapshots import take_snapshot
from nanovllm.serve.live.subscribers import Subscribers
from tests.engine.test_fuzz import build_core, make_requests, make_sequences, repeat_prompts


def stats_of(core: EngineCore) -> CoreStats:
    scheduler = core.scheduler
    return CoreStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_free_blocks=scheduler.blocks.num_free,
        num_preemptions=scheduler.num_preemptions,
    )


def recorded(
    rng: random.Random, caching: bool = True, depth: int = 1
) -> Iterator[tuple[EngineCore, EngineState]]:
    """Run random requests through a small pool, and take a snapshot after every step."""
    requests = make_requests(rng)
    core = build_core(
        num_blocks=rng.choice([9, 12, 20]),
        num_slots=rng.choice([2, 4, 8]),
        budget=rng.choice([3, 7, 32]),
        caching=caching,
        depth=depth,
        is_paced=False,
    )
    log = core.log = StepLog()
    repeat_prompts(rng, requests)
    sequences = make_sequences(requests)
    while sequences or core.has_unfinished:
        while sequences and rng.random() < 0.5:
            core.add(sequences.pop(0).request)
        if rng.random() < 0.05 and core.has_unfinished:
            core.finish(rng.choice(list(core._sequences)), "abort")
        core.step()
        yield core, take_snapshot(core, log, stats_of(core), 0.0)


@pytest.mark.parametrize(("caching", "depth"), [(True, 0), (False, 1), (True, 1)])
def test_snapshots_show_every_block_sequence_and_ending(depth: int, caching: bool) -> None:
    num_preemptions = num_shared = num_cached = 0
    for seed in range(60):
        ended = []
        for core, state in recorded(random.Random(seed), caching, depth):
            scheduler, blocks = core.scheduler, core.scheduler.blocks
            holders = Counter(i for seq in state.sequences for i in seq.held_block_ids)
            assert len(holders) == blocks.num_blocks - blocks.num_free
            cached = [i for i, is_cached in enumerate(state.cached) if is_cached]
            prefixes = blocks.cached.values()
            assert cached == sorted(i for prefix in prefixes for i in prefix.block_ids if i >= 0)
            running = [seq.seq_id for seq in state.sequences if seq.status == "running"]
            assert running == list(scheduler.running)
            assert state.queue == [seq.seq_id for seq in scheduler.waiting]
            assert {seq.seq_id for seq in state.sequences} == {*running, *state.queue}
            ended += [end.seq_id for end in state.ended]
            num_shared = max(num_shared, *holders.values(), 0)
            num_cached = max(num_cached, len(cached))
        assert sorted(ended) == list(range(10))
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > 20
    assert num_shared > 1 or not caching
    assert (num_cached > 0) == caching


def test_snapshots_are_thinned_and_stop_when_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = build_core(num_blocks=20, num_slots=2, budget=32, caching=True, depth=0, is_paced=False)
    now = 100.0
    monkeypatch.setattr(observer, "time", SimpleNamespace(perf_counter=lambda: now))
    watching = Observer(core)
    assert watching.after_step(stats_of(core)) is None
    watching.handle(SendSnapshots(True))
    assert watching.after_step(stats_of(core)) is not None
    core.add(request(0))
    core.step()
    assert watching.after_step(stats_of(core)) is None
    now += 2 * SNAPSHOT_SECONDS
    assert watching.after_step(stats_of(core)) is not None
    now += 2 * SNAPSHOT_SECONDS
    assert watching.after_step(stats_of(core)) is None
    watching.handle(SendSnapshots(True))
    assert watching.after_step(stats_of(core)) is not None
    watching.handle(SendSnapshots(False))
    now += 2 * SNAPSHOT_SECONDS
    assert watching.after_step(stats_of(core)) is None


def request(seq_id: int, num_tokens: int = 6) -> Request:
    return Request(seq_id, array("i", range(1, 11)), SamplingParams(max_tokens=num_tokens))


def loop_updates(
    commands: list[Command], is_last: Callable[[CoreUpdate], object]
) -> tuple[EngineCore, list[CoreUpdate]]:
    """Run a loop that gets all commands at once, and return its updates up to the last one."""
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=1, is_paced=False)
    updates: list[CoreUpdate] = []

    def send(update: CoreUpdate) -> None:
        updates.append(update)
        if is_last(update):
            loop.put(None)

    loop = CoreLoop(core, send, StepTimer())
    for command in commands:
        loop.put(command)
    core.executor.start()
    loop.run()
    return core, updates


def has_shown_an_end(update: CoreUpdate) -> bool:
    return update.state is not None and bool(update.state.ended)


def test_an_abort_is_told_though_nothing_is_left_to_do() -> None:
    """The abort is reported before the next idle update, so that its blocks show as free."""
    begin = time.monotonic()
    commands: list[Command] = [AddRequests([request(0)]), FinishSequence(0, "abort")]
    _, updates = loop_updates(commands, is_last=lambda update: True)
    assert time.monotonic() - begin < IDLE_SECONDS / 2
    assert (updates[0].stats.num_running, updates[0].stats.num_waiting) == (0, 0)


def test_a_request_that_cannot_run_fails_alone() -> None:
    """A restarted core may have less room than the client of the core knows."""
    long = Request(7, array("i", range(400)), SamplingParams(max_tokens=1))
    finished: list[FinishedSequence] = []

    def is_last(update: CoreUpdate) -> bool:
        finished.extend(update.step.finished)
        return len(finished) == 2

    loop_updates([AddRequests([long, request(8)])], is_last)
    refused, other = finished
    assert (refused.seq_id, refused.finish_reason, refused.token_ids) == (7, "error", [])
    assert "the prompt has 400 tokens" in str(refused.error)
    assert (other.seq_id, other.finish_reason) == (8, "length")


@pytest.mark.parametrize("watch", [[], [SendSnapshots(True)]], ids=["alone", "watched"])
def test_a_loop_at_rest_gives_memory_back_once(
    watch: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, idle = [], []
    monkeypatch.setattr(core_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(core_process, "trim_malloc", lambda: given.append(len(idle)))

    def is_last(update: CoreUpdate) -> bool:
        if update.stats.num_running == update.stats.num_waiting == 0:
            idle.append(update)
        return len(idle) == 5

    core, updates = loop_updates([*watch, AddRequests([request(0)])], is_last)
    assert not core.has_unfinished
    assert len(given) == 1
    assert len(updates) > 5  # it has processed requests before


def test_an_idle_loop_captures_graphs_between_looks_for_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=1, is_paced=False)
    executor: Any = core.executor
    loop = CoreLoop(core, lambda update: None, StepTimer())
    num_plans: list[int] = []  # number of plans run before each capture

    def capture_one() -> bool:
        assert not core.has_unfinished
        num_plans.append(len(executor.plans))
        if len(num_plans) == 2:
            loop.put(AddRequests([request(1)]))
        return len(num_plans) < 4

    executor.capture_one = capture_one
    monkeypatch.setattr(core_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(core_process, "trim_malloc", lambda: loop.put(None))
    loop.put(AddRequests([request(0)]))
    executor.start()
    loop.run()
    first, second, third, fourth = num_plans
    assert 0 < first == second < third == fourth


def test_the_loop_shows_every_step_and_ending() -> None:
    _, updates = loop_updates(
        [SendSnapshots(True), AddRequests([request(0), request(1)])], has_shown_an_end
    )
    states = [update.state for update in updates if update.state is not None]
    assert states[-1].sequences == []
    assert sorted(end.seq_id for state in states for end in state.ended) == [0, 1]
    steps = [step for state in states for step in state.steps]
    shown = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    ran = sum(u.step.num_prefill_tokens + u.step.num_decode_tokens for u in updates if u.step)
    assert 0 < shown == ran
    for step in steps:
        assert min(step.schedule, step.submit, step.wait, step.commit, step.device) >= 0


def test_no_snapshots_are_sent_when_nobody_is_subscribed() -> None:
    commands = [
        SendSnapshots(True),
        SendSnapshots(True),
        SendSnapshots(False),
        SendSnapshots(False),
        AddRequests([request(0)]),
    ]
    commands.append(FinishSequence(7, "abort"))
    _, updates = loop_updates(commands, lambda update: update.step and update.step.finished)
    assert all(update.state is None for update in updates)


def test_a_slow_subscriber_gets_the_newest_snapshot_and_every_step() -> None:
    states = [state for _, state in recorded(random.Random(1))][:8]
    asked = []

    async def look() -> None:
        subscribers = Subscribers(asked.append)
        shown = subscribers.subscribe()
        first = asyncio.ensure_future(anext(shown))
        await asyncio.sleep(0)
        subscribers.push(states[0])
        assert await first is states[0]
        for state in states[1:]:
            subscribers.push(state)
        await asyncio.sleep(0)
        late = await anext(shown)
        assert late.sequences == states[-1].sequences
        assert late.steps == [step for state in states[1:] for step in state.steps]
        assert late.ended == [end for state in states[1:] for end in state.ended]
        subscribers.end(EngineError("it died"))
        with pytest.raises(EngineError, match="it died"):
            await anext(shown)
        assert asked == [True, False]

    asyncio.run(look())


def test_a_new_subscriber_takes_no_step_from_the_others() -> None:
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=0, is_paced=False)
    watching = Observer(core)
    watching.handle(SendSnapshots(True))
    core.add(request(0, num_tokens=1))
    core.step()
    watching.handle(SendSnapshots(True))
    state = watching.after_step(stats_of(core))
    assert state is not None
    assert [step.num_prefill_tokens for step in state.steps] == [10]
    assert [end.seq_id for end in state.ended] == [0]
