"""Faults that hide what happened: each is still told of, and soon."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine.step import ExecutorInfo, StepPlan
from nanovllm.errors import WorkerError
from nanovllm.executor import worker_processes
from nanovllm.executor.worker_main import WorkerTask
from tests.executor.workers import Done, ObedientWorker, make_executor, obedient, orders

ROOT = Path(__file__).parents[2]
SECONDS = 5.0  # within which a fault is reported


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor can this be said")


class Late:
    def result(self) -> Any:
        raise Unspeakable


class UnspeakableWorker(ObedientWorker):
    def run(self, plan: StepPlan) -> Any:
        return Late()


class ForkingWorker(ObedientWorker):
    """Dies, and leaves a child that holds its end of the socket."""

    def run(self, plan: StepPlan) -> Done:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class TiedWorker(ObedientWorker):
    """The first rank raises, and the other one ends because of it."""

    def run(self, plan: StepPlan) -> Done:
        if self.rank == 0:
            raise ValueError("the real cause")
        time.sleep(0.05)
        os.abort()


class ClumsyWorker(ObedientWorker):
    def start(self) -> ExecutorInfo:
        logging.getLogger("nanovllm").warning("%d and %d", 1)
        return super().start()


def unspeakable(task: WorkerTask, rank: int) -> ObedientWorker:
    return UnspeakableWorker(rank, lambda: None)


def forking(task: WorkerTask, rank: int) -> ObedientWorker:
    return ForkingWorker(rank, lambda: None)


def tied(task: WorkerTask, rank: int) -> ObedientWorker:
    return TiedWorker(rank, lambda: None)


def clumsy(task: WorkerTask, rank: int) -> ObedientWorker:
    return ClumsyWorker(rank, lambda: None)


@pytest.mark.parametrize(
    ("build_worker", "told"),
    [
        (unspeakable, "exited with code 1"),
        (forking, "was killed by signal 9"),
        (tied, r"(?s)was killed by signal 6.*ValueError: the real cause"),
    ],
)
def test_a_fault_is_told_of(build_worker: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build_worker is tied:  # its death must be waited for, however late it gets to that
        monkeypatch.setattr(worker_processes, "GRACE_SECONDS", SECONDS)
    executor = make_executor(build_worker)
    executor.start()
    pending = executor.submit(orders(1))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=told):
        pending.result()
    assert time.monotonic() - start < SECONDS
    executor.close()


def test_a_bad_log_call_stops_nobody() -> None:
    executor = make_executor(clumsy)
    executor.start()
    assert executor.submit(orders(7)).result().tokens[0] == 7
    executor.close()


def test_a_rank_that_cannot_be_spawned_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = []

    def spawn(rank: int, num_ranks: int, timeout: float) -> worker_processes.WorkerProcess:
        if rank == 1:
            raise OSError("no more processes")
        spawned.append(real_spawn(rank, num_ranks, timeout))
        return spawned[0]

    real_spawn = worker_processes.spawn
    monkeypatch.setattr(worker_processes, "spawn", spawn)
    executor = make_executor(obedient)
    with pytest.raises(OSError, match="no more processes"):
        executor.start()
    assert spawned[0].process.poll() is not None
    assert spawned[0].channel.fileno() == -1


def test_a_thread_that_cannot_start_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        if thread is executor._workers._threads[1]:
            raise RuntimeError("can't start new thread")
        real_start(thread)

    executor, real_start = make_executor(obedient), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.start()
    workers = executor._workers._workers
    assert all(worker.process.poll() is not None for worker in workers)
    assert [worker.channel.fileno() for worker in workers] == [-1, -1]


@pytest.mark.slow
def test_flags_of_the_interpreter_reach_the_workers(tmp_path: Path) -> None:
    """-I ignores PYTHONPATH, where something may wait that no process is to run."""
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('it ran')")
    source = f"import sys; sys.path.insert(0, {str(ROOT)!r}){MOVES_AWAY}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", source],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() == "started", done.stderr


SENDS_TO_THE_DEAD = """
import os, signal, time
from nanovllm.errors import WorkerError
from tests.executor.workers import make_executor, orders, process_ids
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
executor = make_executor()
executor.start()
os.kill(process_ids(executor)[1], signal.SIGKILL)
try:
    while True:
        executor.submit(orders(1)).result()
except WorkerError:
    print("told")
"""
MOVES_AWAY = """
import os
import nanovllm, tests.executor.workers as workers
os.chdir("/")
executor = workers.make_executor()
executor.start()
print("started")
executor.close()
"""
SETS_A_TIMEOUT = """
import socket
from tests.executor.workers import make_executor, orders
socket.setdefaulttimeout(60)
executor = make_executor()
executor.start()
print(executor.submit(orders(7)).result().tokens[0])
executor.close()
"""
FORKS = """
import os
from nanovllm.errors import EngineError
from tests.executor.workers import make_executor, orders
executor = make_executor()
executor.start()
if (pid := os.fork()) == 0:
    try:
        executor.submit(orders(1)).result()
    except EngineError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), executor.submit(orders(8)).result().tokens[0])
executor.close()
"""
# Torch is imported once for all.
FORK_EACH = """
import json, os, sys
import nanovllm.executor.multiproc
for source in json.load(sys.stdin):
    if os.fork() == 0:
        exec(source)
        sys.exit()
    os.wait()
"""


@pytest.mark.slow
def test_programs_with_other_manners() -> None:
    """Each would die, look in the wrong folder, wait in vain or disturb its child's parent."""
    says = {SENDS_TO_THE_DEAD: "told", MOVES_AWAY: "started", SETS_A_TIMEOUT: "7", FORKS: "7 8"}
    done = subprocess.run(
        [sys.executable, "-c", FORK_EACH],
        input=json.dumps([*says]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.splitlines() == [*says.values()], done.stderr
