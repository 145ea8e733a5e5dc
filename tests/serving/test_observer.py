"""A watcher who applies the changes to the snapshot knows what a fresh snapshot says."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from nanovllm.engine.core import EngineCore
from nanovllm.engine.request import Ending, Request
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving import core_process
from nanovllm.serving.core_process import IDLE_SECONDS, Command, CoreLoop
from nanovllm.serving.core_records import Add, CoreStats, CoreUpdate, Finish, Watch
from nanovllm.serving.observer import SECONDS_BETWEEN, Observer, TimedExecutor
from nanovllm.serving.state_records import EngineChange, EngineState
from nanovllm.serving.viewers import MAX_UNREAD, Viewers
from tests.engine.test_fuzz import build_core, make_requests, make_samples, make_sequences
from tests.serving.state_changes import apply, comparable


def stats_of(core: EngineCore) -> CoreStats:
    scheduler = core.scheduler
    return CoreStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_free_blocks=scheduler.blocks.num_free,
        num_preemptions=scheduler.num_preemptions,
    )


def snapshot(core: EngineCore) -> EngineState:
    blocks = core.scheduler.blocks
    table = blocks.cached
    news = Observer(core.scheduler).news(stats_of(core))
    blocks.cached = table
    assert isinstance(news, EngineState)
    return news


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched_run(rng: random.Random, caching: bool, depth: int) -> tuple[EngineCore, int, int]:
    """Compare at every change; return the core, how many there were, and the most shared blocks."""
    requests = make_requests(rng)
    core = build_core(
        num_blocks=rng.choice([9, 12, 20]),
        num_slots=rng.choice([2, 4, 8]),
        budget=rng.choice([3, 7, 32]),
        caching=caching,
        depth=depth,
        is_paced=False,
    )
    sequences = make_sequences(requests, make_samples(rng, requests))
    clock = Clock()
    observer = Observer(core.scheduler, clock)
    core.executor = TimedExecutor(core.executor, observer.timer)
    state, num_changes, num_shared = None, 0, 0
    while sequences or core.has_unfinished:
        while sequences and rng.random() < 0.5:
            core.add(sequences.pop(0).request)
        if rng.random() < 0.05 and core.has_unfinished:
            ending = core.finish(rng.choice(list(core._sequences)), "abort")
            observer.end([ending])
        observer.timer.begin()
        step = core.step()
        observer.timer.end()
        observer.end(step.endings)
        clock.now += rng.choice([0.0, 0.02, SECONDS_BETWEEN])
        if rng.random() < 0.02:
            observer.restart()
        if (news := observer.news(stats_of(core))) is None:
            continue
        state = apply(state, news)
        assert comparable(state) == comparable(snapshot(core))
        holders = [i for seq in state.sequences for i in seq.block_ids]
        blocks = core.scheduler.blocks
        assert len(set(holders)) == blocks.num_blocks - blocks.num_free
        num_shared = max(num_shared, len(holders) - len(set(holders)))
        if isinstance(news, EngineChange):
            num_changes += 1
    return core, num_changes, num_shared


@pytest.mark.parametrize(
    ("caching", "depth"),
    [
        (True, 0),
        (False, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 1), (False, 0))),
    ],
)
def test_changes_add_up_to_a_fresh_snapshot(depth: int, caching: bool) -> None:
    num_preemptions = num_changes = num_shared = 0
    for seed in range(60):
        core, changes, shared = watched_run(random.Random(seed), caching, depth)
        num_preemptions += core.scheduler.num_preemptions
        num_changes += changes
        num_shared = max(num_shared, shared)
    assert num_preemptions > 20
    assert num_changes > 300
    assert num_shared > 0


def test_news_are_thinned_and_stop_when_nothing_changes() -> None:
    core = build_core(num_blocks=20, num_slots=2, budget=32, caching=True, depth=0, is_paced=False)
    clock = Clock()
    observer = Observer(core.scheduler, clock)
    assert isinstance(observer.news(stats_of(core)), EngineState)
    core.add(request(0))
    core.step()
    assert observer.news(stats_of(core)) is None
    assert observer.seconds_to_news(at_most=1.0) == pytest.approx(SECONDS_BETWEEN)
    clock.now += 2 * SECONDS_BETWEEN
    assert isinstance(observer.news(stats_of(core)), EngineChange)
    clock.now += 2 * SECONDS_BETWEEN
    assert observer.news(stats_of(core)) is None
    assert observer.seconds_to_news(at_most=1.0) == 1.0


def request(seq_id: int, num_tokens: int = 6) -> Request:
    return Request(seq_id, array("i", range(1, 11)), SamplingParams(max_tokens=num_tokens))


def loop_updates(
    commands: list[Command], is_last: Callable[[CoreUpdate], object]
) -> tuple[EngineCore, list[CoreUpdate]]:
    """Let a loop obey all commands at once and run until some update is the last."""
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=1, is_paced=False)
    inbox: SimpleQueue[Command | None] = SimpleQueue()
    updates: list[CoreUpdate] = []

    def send(update: CoreUpdate) -> None:
        updates.append(update)
        if is_last(update):
            inbox.put(None)

    for command in commands:
        inbox.put(command)
    core.executor.start()
    CoreLoop(core, inbox, send, contextlib.nullcontext()).run()
    return core, updates


def has_shown_an_end(update: CoreUpdate) -> bool:
    return isinstance(update.news, EngineChange) and bool(update.news.ended)


def test_an_abort_is_told_though_nothing_is_left_to_do() -> None:
    """Not with the next idle update: until then its blocks would seem to be taken."""
    begin = time.monotonic()
    commands: list[Command] = [Add([request(0)]), Finish([0], "abort", is_wanted=False)]
    _, updates = loop_updates(commands, is_last=lambda update: True)
    assert time.monotonic() - begin < IDLE_SECONDS / 2
    assert (updates[0].stats.num_running, updates[0].stats.num_waiting) == (0, 0)


def test_a_request_that_cannot_run_fails_alone() -> None:
    """A core that replaced another may have less room than the front knew of."""
    long = Request(7, array("i", range(400)), SamplingParams(max_tokens=1))
    endings: list[Ending] = []

    def is_last(update: CoreUpdate) -> bool:
        endings.extend(update.step.endings)
        return len(endings) == 2

    loop_updates([Add([long, request(8)])], is_last)
    refused, other = endings
    assert (refused.seq_id, refused.finish_reason, refused.token_ids) == (7, "error", [])
    assert "the prompt has 400 tokens" in str(refused.error)
    assert (other.seq_id, other.finish_reason) == (8, "length")


@pytest.mark.parametrize("watch", [[], [Watch(True)]], ids=["alone", "watched"])
def test_a_loop_at_rest_gives_memory_back_once(
    watch: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, idle = [], []
    monkeypatch.setattr(core_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(core_process, "give_back", lambda: given.append(len(idle)))

    def is_last(update: CoreUpdate) -> bool:
        if update.stats.num_running == update.stats.num_waiting == 0:
            idle.append(update)
        return len(idle) == 5

    core, updates = loop_updates([*watch, Add([request(0)])], is_last)
    assert not core.has_unfinished
    assert len(given) == 1
    assert len(updates) > 5  # it has worked before


def test_an_idle_loop_captures_graphs_between_looks_for_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=1, is_paced=False)
    executor: Any = core.executor
    inbox: SimpleQueue[Command | None] = SimpleQueue()
    num_plans: list[int] = []  # that were run before each capture

    def capture_one() -> bool:
        assert not core.has_unfinished
        num_plans.append(len(executor.plans))
        if len(num_plans) == 2:
            inbox.put(Add([request(1)]))
        return len(num_plans) < 4

    executor.capture_one = capture_one
    monkeypatch.setattr(core_process, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(core_process, "give_back", lambda: inbox.put(None))
    inbox.put(Add([request(0)]))
    executor.start()
    CoreLoop(core, inbox, lambda update: None, contextlib.nullcontext()).run()
    first, second, third, fourth = num_plans
    assert 0 < first == second < third == fourth


def test_the_loop_shows_every_step_and_ending() -> None:
    core, updates = loop_updates([Watch(True), Add([request(0), request(1)])], has_shown_an_end)
    news = [update.news for update in updates if update.news is not None]
    state, *changes = news
    assert isinstance(state, EngineState)
    for change in changes:
        state = apply(state, change)
    assert state.sequences == []
    assert sorted(end.seq_id for change in changes for end in change.ended) == [0, 1]
    steps = [step for change in changes for step in change.steps]
    shown = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    ran = sum(u.step.num_prefill_tokens + u.step.num_decode_tokens for u in updates if u.step)
    assert 0 < shown <= ran
    for step in steps:
        assert min(step.schedule, step.submit, step.wait, step.commit, step.device) >= 0
    assert isinstance(core.executor, TimedExecutor)


def test_nothing_is_left_of_the_observer_when_nobody_looks() -> None:
    commands = [Watch(True), Watch(True), Watch(False), Watch(False), Add([request(0)])]
    commands.append(Finish([7], "abort"))
    core, updates = loop_updates(commands, lambda update: update.step and update.step.endings)
    assert all(update.news is None for update in updates)
    assert not isinstance(core.executor, TimedExecutor)
    assert type(core.scheduler.blocks.cached) is dict


def test_a_viewer_who_falls_behind_gets_the_state_anew() -> None:
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=0, is_paced=False)
    state, asked = snapshot(core), []
    change = EngineChange([], [], [], [], None, [], [], [], [], state.stats, 0)

    async def look() -> None:
        viewers = Viewers(asked.append)
        news = viewers.look()
        first = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0)
        viewers.push(change)  # of a state that it does not know
        viewers.push(state)
        assert await first is state
        for _ in range(MAX_UNREAD + 1):
            viewers.push(change)
        await asyncio.sleep(0)
        second = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0)
        assert asked == [True, True]
        viewers.push(state)
        assert await second is state
        viewers.fail(EngineError("it died"))
        with pytest.raises(EngineError, match="it died"):
            await anext(news)
        assert asked == [True, True, False]

    asyncio.run(look())


def test_who_joins_takes_no_step_from_those_who_watched_before() -> None:
    core = build_core(num_blocks=20, num_slots=4, budget=32, caching=True, depth=0, is_paced=False)
    clock = Clock()
    observer = Observer(core.scheduler, clock)
    core.executor = TimedExecutor(core.executor, observer.timer)
    assert observer.news(stats_of(core)) is not None
    core.add(request(0, num_tokens=1))
    observer.timer.begin()
    step = core.step()
    observer.timer.end()
    observer.end(step.endings)
    observer.restart()
    clock.now += 2 * SECONDS_BETWEEN
    state = observer.news(stats_of(core))
    assert isinstance(state, EngineState)
    assert [taken.num_prefill_tokens for taken in state.steps] == [10]
    assert [end.seq_id for end in state.ended] == [0]
