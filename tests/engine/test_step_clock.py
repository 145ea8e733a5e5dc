"""What a step may take: a known one little more than it took, a new one as long as it needs."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from threading import Thread

import numpy as np
import pytest

from nanovllm.engine.step import ExecutorInfo, StepPlan
from nanovllm.engine.step_clock import FIRST_USE_SECONDS, StepClock

INFO = ExecutorInfo(100, 0, "cpu", "float32", num_weights_per_token=135_000_000)
GPU = ExecutorInfo(100, 1, "cuda", "bfloat16", num_weights_per_token=135_000_000)


class FakeTime:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(counts: list[int], starts: list[int] | None = None) -> StepPlan:
    first = np.array([0] * len(counts) if starts is None else starts, np.int32)
    column = np.array(counts, np.int32)
    return StepPlan(column, first, column, column, [], [], [], 0)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def clock(time: FakeTime) -> StepClock:
    return StepClock(INFO, time)


def run(clock: StepClock, time: FakeTime, step: StepPlan, seconds: float) -> float:
    """Return the limit of a step that takes some seconds."""
    clock.begin(step)
    limit = clock.limit(5.0, 10.0)
    time.now += seconds
    clock.end()
    return limit


def test_only_the_first_step_of_a_cpu_may_hang_for_longer(clock: StepClock, time: FakeTime) -> None:
    limits = [run(clock, time, plan([1], [10 + i]), 0.02) for i in range(100)]
    limits += [run(clock, time, plan([1] * num), 0.03) for num in (2, 3, 4, 9)]
    assert limits[0] == 5.0 + FIRST_USE_SECONDS["cpu"]
    assert set(limits[1:]) == {5.0}


def test_kernels_of_a_gpu_may_be_compiled_for_a_new_size(time: FakeTime) -> None:
    clock = StepClock(GPU, time)
    limits = [run(clock, time, plan([1] * num), 0.02) for num in (1, 1, 2, 3, 4, 4, 5)]
    late = 5.0 + FIRST_USE_SECONDS["cuda"]
    assert limits == [late, 5.0, late, 5.0, late, 5.0, 5.0]


def test_a_size_that_is_new_is_measured_by_those_that_are_known(
    clock: StepClock, time: FakeTime
) -> None:
    """And not by what the slowest of all devices would take."""
    for size in (1, 1, 60, 60):
        run(clock, time, plan([size]), 0.001 * size)
    limit = run(clock, time, plan([8000]), 8.0)
    assert 8.0 < limit < 2 * 10 * 8.0


def test_a_slow_device_gets_ten_times_what_it_took(clock: StepClock, time: FakeTime) -> None:
    run(clock, time, plan([1], [10]), 2.0)
    assert run(clock, time, plan([1], [11]), 2.0) == pytest.approx(20.0)


def test_a_prompt_longer_than_any_before_gets_its_time(clock: StepClock, time: FakeTime) -> None:
    """Whatever short steps took: 8,000 tokens at 20 GFLOP/s, after answers that took no time."""
    for i in range(50):
        run(clock, time, plan([1], [10 + i]), 0.01)
    seconds = 8000 * 2 * INFO.num_weights_per_token / 20e9
    assert run(clock, time, plan([8000]), seconds) > seconds


def test_more_context_gets_more_time(clock: StepClock, time: FakeTime) -> None:
    """Each step takes twice as long as the last, with twice the keys."""
    seconds, start = 1.0, 100
    for _ in range(8):
        assert run(clock, time, plan([64], [start]), seconds) > seconds
        seconds, start = 2 * seconds, 2 * start


def test_steps_in_flight_add_up(clock: StepClock, time: FakeTime) -> None:
    for _ in range(2):
        run(clock, time, plan([1], [10]), 1.0)
    clock.begin(plan([1], [10]))
    clock.begin(plan([1], [11]))
    assert clock.limit(5.0, 10.0) == pytest.approx(20.0)
    time.now += 1.0
    clock.end()
    assert clock.limit(5.0, 10.0) == pytest.approx(10.0)


def test_steps_may_end_in_another_thread() -> None:
    """As replies of workers do: they come while the next step begins, or the limit is asked for."""
    clock, ended = StepClock(INFO), SimpleQueue[bool]()
    steps = [plan([2**power], [2**power]) for power in range(15)]

    def end_all() -> None:
        while ended.get():
            clock.end()

    interval = sys.getswitchinterval()
    thread = Thread(target=end_all)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        for i in range(30_000):
            clock.begin(steps[i % 15])
            ended.put(True)
            assert clock.limit(5.0, 10.0) >= 5.0
    finally:
        sys.setswitchinterval(interval)
        ended.put(False)
        thread.join()
    assert clock.limit(5.0, 10.0) == 5.0
