"""Worker processes: their results, their failures, and that none is leaked."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine.plan_broadcast import decode_rows, long_prompts
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.errors import ConfigError, EngineError, WorkerError
from nanovllm.parallel import supervisor
from nanovllm.parallel.multiproc_executor import MultiprocExecutor
from nanovllm.parallel.rendezvous import host_store
from tests.parallel.leftovers import Leftovers, wait_until
from tests.parallel.workers import (
    NUM_EXTRA,
    Order,
    dying,
    make_executor,
    meeting,
    obedient,
    orders,
    process_ids,
    raising,
    refusing,
    sleeping,
)

NOBODY = 5  # a rank that does not exist
SECONDS = 60.0  # deadline for reports of failures, even on a busy machine
NUM_KILLS = 5


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leftovers]:
    """Check that no test leaks a process, descriptor, thread, file or shared memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host_store()  # the first store of a process makes libuv open a permanent pipe
    gc.collect()
    before = Leftovers(tmp_path)
    yield before
    gc.collect()
    before.check()


@pytest.fixture
def executor(leftovers: Leftovers) -> Iterator[MultiprocExecutor]:
    executor = make_executor()
    executor.start()
    yield executor
    executor.close()


@pytest.fixture
def meeting_executor(leftovers: Leftovers) -> Iterator[MultiprocExecutor]:
    executor = make_executor(meeting)
    executor.start()
    yield executor
    executor.close()


def answer(executor: MultiprocExecutor, *numbers: int) -> list[int]:
    return executor.submit(orders(*numbers)).result().tokens.tolist()


def test_answers_come_in_order_and_from_the_first_rank(executor: MultiprocExecutor) -> None:
    pending = [executor.submit(orders(7, 7, number)) for number in range(50)]
    assert [each.result().tokens[2] for each in pending] == list(range(50))
    assert answer(executor, 9)[1] == process_ids(executor)[0]


def test_a_plan_of_many_tokens_passes(executor: MultiprocExecutor) -> None:
    plan = long_prompts(64, 30_000)
    want = sum(int(row.token_ids.sum(dtype=np.int64)) for row in plan.new_rows) % 2**31
    for _ in range(3):
        pending = [executor.submit(plan), executor.submit(decode_rows(4)), executor.submit(plan)]
        assert [int(each.result().tokens[-1]) for each in pending] == [want, 0, want]


def test_the_first_rank_speaks_and_all_of_them_warn(
    leftovers: Leftovers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nanovllm"):
        executor = make_executor(size=3)
        info = executor.start()
        answer(executor, 1)  # the log records arrive before this reply
    assert info == ExecutorInfo(100, 1, "cpu", "float32")  # the info of rank 0
    messages = sorted(record.getMessage() for record in caplog.records)
    assert [m for m in messages if "model" in m] == [f"rank {n} is no model" for n in range(3)]
    assert [m for m in messages if "pool" in m] == ["the pool of rank 0"]
    executor.close()


def test_closing_fails_whoever_waits_and_whoever_comes(leftovers: Leftovers) -> None:
    executor = make_executor()
    executor.start()
    pending = executor.submit(orders(Order.SLEEP, 0))
    errors: list[BaseException] = []
    waiter = threading.Thread(target=lambda: errors.append(error_of(pending)))
    waiter.start()
    executor.close()
    executor.close()
    waiter.join(SECONDS)
    assert [type(error) for error in errors] == [EngineError]
    with pytest.raises(EngineError, match="is closed"):
        executor.submit(orders(1))


def error_of(pending: object) -> BaseException:
    with pytest.raises(EngineError) as caught:
        pending.result()  # type: ignore[attr-defined]
    return caught.value


def test_an_executor_that_never_started_closes(leftovers: Leftovers) -> None:
    make_executor().close()


def test_a_dropped_executor_takes_its_workers_along(leftovers: Leftovers) -> None:
    executor = make_executor()
    executor.start()
    executor.submit(orders(Order.SLEEP, 1))
    gc.disable()  # no reference cycle may keep it alive
    try:
        del executor
        leftovers.check()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("order", "rank", "build_worker"),
    [
        (Order.RAISE, 0, obedient),
        pytest.param(Order.RAISE, 1, meeting, marks=pytest.mark.slow),
        (Order.RAISE_LATE, 0, obedient),  # only rank 0 waits for tokens
        (Order.DIE, 0, obedient),
    ],
)
def test_a_fault_in_a_step_fails_every_waiter(
    leftovers: Leftovers, order: Order, rank: int, build_worker: object
) -> None:
    """This holds even if rank 0, which sends the results, waits in a collective."""
    executor = make_executor(build_worker)
    executor.start()
    check_process(executor, build_worker)
    pending = [executor.submit(orders(1, 2, 3)), executor.submit(orders(order, rank))]
    pending += [executor.submit(orders(Order.MEET, NOBODY)) for _ in range(3)]
    pid = process_ids(executor)[rank]
    causes = {
        Order.RAISE: rf'(?s)worker {rank} of 2 failed.*File ".*rank {rank} was told to raise',
        Order.RAISE_LATE: r'(?s)worker 0 of 2 failed.*File ".*no such token',
        Order.DIE: rf"worker {rank} of 2 \(process {pid}\) was killed by signal 9",
    }
    start = time.monotonic()
    with contextlib.suppress(WorkerError):  # the failure may come first
        assert pending[0].result().tokens[0] == 1
        pending[1].result()
    for each in pending[-3:]:
        with pytest.raises(WorkerError, match=causes[order]):
            each.result()
    with pytest.raises(WorkerError, match=causes[order]):
        executor.submit(orders(1))
    assert time.monotonic() - start < SECONDS
    leftovers.check(but_fds=True)  # the healthy workers are gone as well
    executor.close()


def check_process(executor: MultiprocExecutor, build_worker: object) -> None:
    """Ranks have their own session, and those that use torch share the cores."""
    pid, session, num_threads, _ = answer(executor, 3)[-NUM_EXTRA:]
    assert session == pid != os.getsid(0)
    if build_worker is meeting:
        assert num_threads == max(torch.get_num_threads() // 2, 1)


@pytest.mark.slow
def test_a_death_is_reported_while_another_rank_is_in_a_collective(
    meeting_executor: MultiprocExecutor,
) -> None:
    victim = 1
    pending = meeting_executor.submit(orders(Order.MEET, victim))
    os.kill(process_ids(meeting_executor)[victim], 9)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker {victim} of 2 .* was killed by signal 9"):
        pending.result()
    assert time.monotonic() - start < SECONDS


def test_a_stopped_worker_is_noticed(executor: MultiprocExecutor) -> None:
    check_stopped(executor, rank=0)


@pytest.mark.slow
def test_a_worker_stopped_in_a_collective_is_noticed(meeting_executor: MultiprocExecutor) -> None:
    """Rank 0 replies only after the collective, so it does not matter which rank hangs."""
    check_stopped(meeting_executor, rank=1)


def test_a_step_that_does_not_return_is_a_hang(leftovers: Leftovers) -> None:
    executor = make_executor(step_timeout=0.5)
    executor.start()
    with pytest.raises(WorkerError, match=r"worker 0 of 2 did not return from a step for \d s"):
        executor.submit(orders(Order.SLEEP, 0)).result()
    with pytest.raises(WorkerError, match="did not return"):
        executor.submit(orders(7))
    executor.close()


def check_stopped(executor: MultiprocExecutor, rank: int) -> None:
    meet = orders(Order.MEET, NOBODY)
    os.kill(process_ids(executor)[rank], signal.SIGSTOP)
    pending = [executor.submit(meet) for _ in range(2)]
    for each in pending:
        with pytest.raises(WorkerError, match=rf"worker {rank} of 2 sent no heartbeat for 4\.5 s"):
            each.result()
    with pytest.raises(WorkerError, match="no heartbeat"):
        executor.submit(meet)


def test_a_death_is_noticed_while_nobody_waits(executor: MultiprocExecutor) -> None:
    os.kill(process_ids(executor)[1], 9)
    wait_until(lambda: executor.supervisor.failure is not None, SECONDS)
    with pytest.raises(WorkerError, match="worker 1 of 2"):
        executor.submit(orders(1))


@pytest.mark.parametrize(
    ("build_worker", "kind", "text"),
    [
        (raising, WorkerError, r'(?s)worker 1 of 2 failed.*File ".*ValueError: this worker cannot'),
        (dying, WorkerError, r"worker 1 of 2 \(process \d+\) exited with code 7"),
        (refusing, ConfigError, "^no room; lower num_kvcache_blocks$"),
    ],
)
def test_a_fault_in_start_up(
    leftovers: Leftovers, build_worker: object, kind: type[Exception], text: str
) -> None:
    executor = make_executor(build_worker)
    with pytest.raises(kind, match=text) as caught:
        executor.start()
    if kind is ConfigError:
        assert "in refusing" in str(caught.value.__cause__)
    with pytest.raises(kind, match=text):
        executor.submit(orders(1))


def test_a_worker_that_does_not_go_is_killed(
    executor: MultiprocExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.3)
    answer(executor, Order.STAY, 0)
    start = time.monotonic()
    executor.close()
    assert 0.2 < time.monotonic() - start < SECONDS


def test_start_up_can_be_given_up(leftovers: Leftovers) -> None:
    executor = make_executor(sleeping)
    errors: list[BaseException] = []

    def start() -> None:
        with pytest.raises(EngineError) as caught:
            executor.start()
        errors.append(caught.value)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: len(process_ids(executor)) == 2, SECONDS)
    executor.close()
    thread.join(SECONDS)
    assert [type(error) for error in errors] == [EngineError]


def test_kills_at_random_moments(leftovers: Leftovers) -> None:
    rng = np.random.default_rng(0)
    for _ in range(NUM_KILLS):
        executor = make_executor()
        executor.start()
        victim = int(rng.integers(2))
        delay = rng.random() * 0.02
        pid = process_ids(executor)[victim]
        threading.Timer(delay, os.kill, (pid, 9)).start()
        deadline = time.monotonic() + delay + SECONDS
        with pytest.raises(WorkerError, match=rf"worker {victim} of 2 \(process {pid}\) was kill"):
            answer_until(executor, deadline)
        executor.close()
        leftovers.check()


def test_kills_during_start_up(leftovers: Leftovers) -> None:
    rng = np.random.default_rng(1)
    for _ in range(NUM_KILLS):
        executor = make_executor()
        killer = threading.Timer(rng.random() * 0.3, kill_one, (executor, int(rng.integers(2))))
        killer.start()
        with pytest.raises(WorkerError, match="was killed by signal 9"):
            start_and_answer(executor)
        killer.join()
        executor.close()
        leftovers.check()


def answer_until(executor: MultiprocExecutor, deadline: float) -> None:
    while time.monotonic() < deadline:
        answer(executor, Order.MEET, NOBODY)


def start_and_answer(executor: MultiprocExecutor) -> None:
    executor.start()
    answer_until(executor, time.monotonic() + SECONDS)


def kill_one(executor: MultiprocExecutor, victim: int) -> None:
    wait_until(lambda: len(process_ids(executor)) > victim, SECONDS)
    os.kill(process_ids(executor)[victim], 9)
