"""Prefill beside decode, on a simulated device whose steps take a known time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.features.latency.prompt_budget import MIN_QUEUED_TOKENS, PromptBudget
from nanovllm.sampling_params import SamplingParams

TARGET = 0.025
MIN_PROMPT_TOKENS = 64
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
Cost = Callable[[StepPlan], float]  # in seconds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Device:
    """Runs plans one by one, asynchronously; the clock advances when a result is awaited."""

    clock: Clock
    cost: Cost
    plans: list[StepPlan] = field(default_factory=list)
    end: float = 0.0

    def start(self) -> ExecutorInfo:
        return ExecutorInfo(0, 0, "simulated", "none")

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Step:
        self.plans.append(plan)
        self.end = max(self.clock.now, self.end) + self.cost(plan)
        return Step(self.clock, self.end, int(plan.num_logits.sum()))


@dataclass
class Step:
    clock: Clock
    end: float
    num_tokens: int

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        return StepResult(np.full(self.num_tokens, 5, np.int32))


def accelerator(plan: StepPlan) -> float:
    """Cost model of an 8B model on an H200, where prefill steps are padded to a few sizes."""
    num_tokens = int(plan.counts.sum())
    if num_tokens > len(plan.counts):
        sizes = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
        num_tokens = next((size for size in sizes if size >= num_tokens), num_tokens)
    pairs = plan.counts @ (plan.starts + plan.counts / 2)
    keys = (plan.starts + plan.counts).sum()
    return float(max(0.004, 21e-6 * num_tokens) + 36e-9 * keys + 1e-9 * pairs + 0.5e-3)


class Engine:
    """A core on a simulated device, which records when each completion got its tokens."""

    def __init__(
        self, cost: Cost = accelerator, depth: int = 1, target: float | None = TARGET
    ) -> None:
        self.clock = Clock()
        self.device = Device(self.clock, cost)
        self.prompt_budget = None if target is None else PromptBudget(target, MIN_PROMPT_TOKENS)
        features = [] if self.prompt_budget is None else [self.prompt_budget]
        scheduler = Scheduler(BlockManager(4096, 64, True), 256, 16384, features)
        self.core = EngineCore(scheduler, self.device, depth, 65536, clock=self.clock)
        self.token_times: dict[int, list[float]] = {}

    def add(
        self,
        seq_id: int,
        prompt_len: int,
        max_tokens: int,
        request_id: str = "",
        prefix: tuple[int, ...] = (),
        **params: int,
    ) -> None:
        self.token_times[seq_id] = []
        prompt = array("i", [*prefix, *[seq_id + 1] * prompt_len])
        sampling_params = SamplingParams(max_tokens=max_tokens, **params)
        request = Request(seq_id, prompt, sampling_params, is_streaming=True, request_id=request_id)
        self.core.add(request)

    def step(self) -> None:
        for seq_id in self.core.step().seq_ids:
            self.token_times[seq_id].append(self.clock.now)

    def serve(self, arrivals: list[tuple[float, int, int]]) -> None:
        """Serve requests of (time, prompt length, completion length)."""
        waiting = dict(enumerate(arrivals))
        while waiting or self.core.has_unfinished:
            for seq_id, (time, *lengths) in list(waiting.items()):
                if time <= self.clock.now:
                    del waiting[seq_id]
                    self.add(seq_id, *lengths)
            if self.core.has_unfinished:
                self.step()
            else:
                self.clock.now = min(time for time, *_ in waiting.values())

    def waits(self, first_seq_id: int = 0) -> list[float]:
        """Return the sorted seconds between tokens."""
        times = [times for seq_id, times in self.token_times.items() if seq_id >= first_seq_id]
        gaps = [np.diff(each) for each in times]
        return np.sort(np.concatenate(gaps)).tolist()

    def prompt_counts(self) -> list[int]:
        """Return the number of prompt tokens in each step that has any."""
        counts = [int(plan.counts.sum()) - len(plan.counts) for plan in self.device.plans]
        return [count for count in counts if count]


def poisson(rate: float, num: int, prompt_lens: list[int]) -> list[tuple[float, int, int]]:
    rng, time, arrivals = random.Random(0), 0.0, []
    for _ in range(num):
        time += rng.expovariate(rate)
        arrivals.append((time, rng.choice(prompt_lens), 64))
    return arrivals


@pytest.mark.parametrize(
    ("rate", "prompt_lens", "depth"),
    [
        (40.0, [512], 0),
        (40.0, [512], 1),
        pytest.param(12.0, [100, 100, 3000], 0, marks=pytest.mark.slow),
        (12.0, [100, 100, 3000], 1),
        *(pytest.param(2.0, [100, 30000], depth, marks=pytest.mark.slow) for depth in (0, 1)),
    ],
)
def test_answers_keep_the_target(depth: int, rate: float, prompt_lens: list[int]) -> None:
    arrivals = poisson(rate, 120, prompt_lens)
    paced, unpaced = Engine(depth=depth), Engine(depth=depth, target=None)
    paced.serve(arrivals)
    unpaced.serve(arrivals)
    waits = paced.waits(first_seq_id=20)
    assert waits[int(0.95 * len(waits))] <= TARGET
    assert waits[-1] < 1.5 * TARGET
    assert unpaced.waits()[-1] > 2 * TARGET
    assert all(len(times) == 64 for times in paced.token_times.values())


@DEPTHS
def test_the_first_prompts_beside_answers_are_kept_short(depth: int) -> None:
    """Step durations are unknown at first, so the chunks grow from step to step."""
    engine = Engine(depth=depth)
    engine.add(0, 64, 400)
    for _ in range(3):
        engine.step()
    engine.add(1, 16000, 5)
    while not engine.token_times[1]:
        engine.step()
    counts = engine.prompt_counts()[1:]
    assert counts[0] <= 256
    assert max(counts) > 700
    assert engine.waits()[-1] < 1.5 * TARGET


@DEPTHS
def test_a_prompt_makes_progress_beside_answers_that_are_too_slow(depth: int) -> None:
    engine = Engine(lambda plan: 10 * TARGET, depth)
    for seq_id in range(4):
        engine.add(seq_id, 100, 1000)
    for _ in range(20):
        engine.step()
    num_before = len(engine.device.plans)
    engine.add(4, 2000, 5)
    while not engine.token_times[4]:
        engine.step()
    assert len(engine.device.plans) - num_before <= 2000 // MIN_PROMPT_TOKENS + 3


@DEPTHS
def test_a_long_prompt_on_a_slow_device_freezes_no_stream(depth: int) -> None:
    """A CPU with 50 tokens per second would need a minute, in which streams got no token."""
    engine = Engine(lambda plan: 0.02 * float(plan.counts.sum()), depth)
    engine.add(0, 20, 200)
    for _ in range(3):
        engine.step()
    engine.add(1, 3001, 5)
    while not engine.token_times[1]:
        engine.step()
    assert engine.waits()[-1] < 1.5


@DEPTHS
def test_one_slow_step_changes_little(depth: int) -> None:
    """It changes the budget by at most one of the sizes that steps are padded to."""
    engine = Engine(depth=depth)
    engine.serve(poisson(40.0, 100, [512]))
    prompt_budget = engine.prompt_budget
    assert prompt_budget is not None
    before = prompt_budget.num_prompt_tokens(30)
    engine.device.cost = lambda plan: 3.0
    engine.add(100, 512, 3)
    engine.step()
    engine.device.cost = accelerator
    while engine.core.has_unfinished:
        engine.step()
    assert prompt_budget.num_prompt_tokens(30) > 0.6 * before


@DEPTHS
def test_a_slow_first_step_is_soon_forgotten(depth: int) -> None:
    engine = Engine(lambda plan: accelerator(plan) + (5.0 if plan.new_rows else 0.0), depth)
    engine.add(0, 2000, 64)
    engine.step()
    engine.device.cost = accelerator
    engine.add(1, 16000, 5)
    while not engine.token_times[1]:
        engine.step()
    assert max(engine.prompt_counts()[1:]) > 500


@DEPTHS
def test_long_answers_do_not_make_it_forget_what_prompts_take(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.serve(poisson(20.0, 60, [512]))
    engine.add(100, 100, 2000)
    for _ in range(1500):
        engine.step()
    engine.add(101, 16000, 5)
    while not engine.token_times[101]:
        engine.step()
    assert engine.waits(100)[-1] < 1.5 * TARGET


@DEPTHS
def test_prompts_alone_are_read_at_once(depth: int) -> None:
    engine = Engine(depth=depth)
    for seq_id in range(3):
        engine.add(seq_id, 5000, 2)
    engine.step()
    assert engine.device.plans[0].counts.tolist() == [5000, 5000, 5000]


def processor(plan: StepPlan) -> float:
    """Cost model of a small model on a CPU, with prompt logprobs."""
    return 0.01 + 0.5e-3 * float(plan.counts.sum())


@DEPTHS
def test_a_request_of_many_prompts_takes_turns_with_others(depth: int) -> None:
    def first_token(num_prompts: int, prompt_len: int, num_before: int = 3) -> float:
        engine = Engine(processor, depth)
        for seq_id in range(num_prompts):
            engine.add(seq_id, 1900, 1, "many")
        for _ in range(num_before):
            engine.step()
        start, num_plans = engine.clock.now, len(engine.device.plans)
        engine.add(1000, prompt_len, 1)
        while not engine.token_times[1000]:
            engine.step()
        seconds, beside = engine.clock.now - start, slice(num_plans, len(engine.device.plans))
        while engine.core.has_unfinished:
            engine.step()
            engine.core.scheduler.check()
        counts = [plan.counts.sum() for plan in engine.device.plans]
        del counts[beside]
        # The first step was planned before anything was measured; the last prompt is not limited.
        assert num_prompts == 0 or max(counts[1 + depth : -3]) <= MIN_QUEUED_TOKENS
        first_tokens = [engine.token_times[seq_id][0] for seq_id in range(num_prompts)]
        assert first_tokens == sorted(first_tokens)
        return seconds

    assert first_token(60, 1900) < 3 * first_token(0, 1900)
    step = 0.01 + 0.5e-3 * MIN_QUEUED_TOKENS
    for num_before in range(3, 33):  # also where a prompt of the other request ends
        # Those in flight, and its own.
        assert first_token(4, 20, num_before) < (2.1 + depth) * step


def engine_with_cached(prefix: tuple[int, ...], depth: int) -> Engine:
    engine = Engine(processor, depth)
    engine.add(1000, 1, 1, prefix=prefix)
    while engine.core.has_unfinished:
        engine.step()
    return engine


@DEPTHS
def test_a_cached_prompt_lets_few_of_a_request_begin(depth: int) -> None:
    """It takes less of the step than its length says; what is left goes to one prompt."""
    prefix = (7,) * 3000
    engine = engine_with_cached(prefix, depth)
    for seq_id in range(400):
        engine.add(seq_id, 1000, 1, "many")
    for _ in range(4):
        engine.step()
    engine.add(1001, 20, 1, prefix=prefix)
    most_running = 0
    while not engine.token_times[1001]:
        engine.step()
        most_running = max(most_running, len(engine.core.scheduler.running))
    assert most_running <= 3


@DEPTHS
def test_samples_of_a_prompt_beside_cached_prompts_compute_it_once(depth: int) -> None:
    """What a cached prompt leaves of a step does not begin another sample."""
    prefix = (7,) * 640
    engine = engine_with_cached(prefix, depth)
    for seq_id in range(8):
        engine.add(seq_id, 1, 1, "samples", prefix=(9,) * 3000)
    num_before, number = len(engine.device.plans), 0
    while engine.core.has_unfinished:
        engine.add(1001 + number, 20, 1, prefix=prefix)
        engine.step()
        number += 1
        if number > 100:
            break
    while engine.core.has_unfinished:
        engine.step()
    total = sum(int(plan.counts.sum()) for plan in engine.device.plans[num_before:])
    assert total < 3001 + 8 * 64 + 21 * number


@DEPTHS
@pytest.mark.parametrize("num_series", [2, 6])
def test_a_small_request_waits_for_no_series(depth: int, num_series: int) -> None:
    """However many requests with long prompts run, it gets what it needs of the next step."""
    engine = Engine(processor, depth)
    for seq_id in range(4 * num_series):
        engine.add(seq_id, 20_000, 1, f"series {seq_id % num_series}")
    for _ in range(4 * num_series):
        engine.step()
    engine.add(1000, 50, 1)
    num_steps = 0
    while not engine.token_times[1000]:
        engine.step()
        num_steps += 1
    assert num_steps <= 1 + depth


@DEPTHS
def test_a_few_short_prompts_wait_for_no_series(depth: int) -> None:
    engine = Engine(processor, depth)
    for seq_id in range(20):
        engine.add(seq_id, 2000, 1, "many")
    for _ in range(4):
        engine.step()
    for seq_id in range(100, 104):
        engine.add(seq_id, 50, 1, "few")
    for _ in range(1 + depth):
        engine.step()
    assert all(engine.token_times[seq_id] for seq_id in range(100, 104))


@DEPTHS
def test_a_series_does_not_starve(depth: int) -> None:
    """It gets a quarter of each step, although small requests could use it all."""
    engine, number = Engine(processor, depth), 100
    for seq_id in range(10):
        engine.add(seq_id, 300, 1, "many")
    num_steps = 0
    while not engine.token_times[9]:
        engine.add(number, 95, 1)
        engine.step()
        number, num_steps = number + 1, num_steps + 1
    assert num_steps < 1.2 * 10 * 300 / (MIN_QUEUED_TOKENS / 4)


@DEPTHS
@pytest.mark.parametrize("prompt_len", [20, 1900])
def test_a_series_alone_runs_at_full_speed(depth: int, prompt_len: int) -> None:
    seconds = []
    for target in (None, TARGET):
        engine = Engine(depth=depth, target=target)
        for seq_id in range(120):
            engine.add(seq_id, prompt_len, 1, "many")
        while engine.core.has_unfinished:
            engine.step()
        seconds.append(engine.clock.now)
    assert seconds[1] < 1.03 * seconds[0]


@DEPTHS
def test_a_series_leaves_nothing_to_less_urgent_requests(depth: int) -> None:
    engine = Engine(processor, depth)
    for seq_id in range(4):
        engine.add(seq_id, 1000, 1, "many")
    engine.add(4, 20, 1, priority=1)
    while engine.core.has_unfinished:
        engine.step()
    order = sorted(range(5), key=engine.token_times.__getitem__)
    assert order[:3] == [0, 1, 2]
    plans = engine.device.plans[1 + depth : -4]
    assert {int(plan.counts.sum()) for plan in plans} == {MIN_QUEUED_TOKENS}


@DEPTHS
def test_samples_of_one_prompt_are_no_series(depth: int) -> None:
    engine = Engine(processor, depth)
    for seq_id in range(8):
        engine.add(seq_id, 1, 1, "samples", prefix=(9,) * 3000, n=8)
    engine.step()
    assert engine.device.plans[0].counts[0] == 3001


@DEPTHS
def test_requests_with_several_prompts_are_admitted_in_turns(depth: int) -> None:
    """Their own prompts keep their order, and a request with one prompt waits for one of each."""
    engine = Engine(processor, depth)
    for seq_id in range(12):
        engine.add(seq_id, 2000, 1, "ab"[seq_id // 6])
    engine.add(12, 2000, 1)
    assert [seq.seq_id for seq in engine.core.scheduler.waiting][:5] == [0, 6, 12, 1, 7]
    while engine.core.has_unfinished:
        engine.step()
    order = sorted(range(13), key=engine.token_times.__getitem__)
    assert order.index(12) <= 4
    for prompts in (range(6), range(6, 12)):
        assert [seq_id for seq_id in order if seq_id in prompts] == list(prompts)


@DEPTHS
def test_a_target_that_no_step_reaches_changes_no_plan(depth: int) -> None:
    engines = [Engine(depth=depth, target=target) for target in (None, 1000.0)]
    for engine in engines:
        engine.serve([(0.0, 2000, 3), *poisson(15.0, 40, [20, 900])])
    for plan, paced in zip(engines[0].device.plans, engines[1].device.plans, strict=True):
        assert plan.slots.tolist() == paced.slots.tolist()
        assert plan.counts.tolist() == paced.counts.tolist()


@DEPTHS
def test_every_answer_has_a_row_in_every_step(depth: int) -> None:
    """An unfinished prompt never delays a decode row."""
    engine = Engine(depth=depth)
    engine.serve(poisson(15.0, 60, [20, 900, 5000]))
    running: dict[int, int] = {}  # remaining tokens of decoding sequences, keyed by slot
    for plan in engine.device.plans:
        for slot in plan.released:
            running.pop(slot, None)
        assert {slot for slot, left in running.items() if left} <= set(plan.slots.tolist())
        for slot, is_sampled in zip(plan.slots.tolist(), plan.num_logits.tolist(), strict=True):
            if is_sampled:
                running[slot] = running.get(slot, 64) - 1
