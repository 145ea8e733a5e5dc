"""Failures that obscure their cause: each is still reported, and soon."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.step import StepPlan
from nanovllm.errors import WorkerError
from nanovllm.parallel import supervisor
from nanovllm.parallel.supervisor import ChildProcess, ChildProcesses
from nanovllm.parallel.worker_main import WorkerTask
from tests.parallel.workers import (
    Done,
    ObedientWorker,
    make_executor,
    obedient,
    orders,
    start_alone,
)

ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # deadline for reports of failures, even on a busy machine


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor can this be said")


class Late:
    def result(self) -> Any:
        raise Unspeakable


class UnspeakableWorker(ObedientWorker):
    def submit(self, plan: StepPlan) -> Any:
        return Late()


class TiedWorker(ObedientWorker):
    """A worker of two: rank 0 raises, and the other rank exits because of it."""

    def submit(self, plan: StepPlan) -> Done:
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


def tied(task: WorkerTask, rank: int) -> ObedientWorker:
    return TiedWorker(rank, lambda: None)


def clumsy(task: WorkerTask, rank: int) -> ObedientWorker:
    return ClumsyWorker(rank, lambda: None)


@pytest.mark.parametrize(
    ("build_worker", "told"),
    [
        (unspeakable, "exited with code 1"),
        (tied, r"(?s)was killed by signal 6.*ValueError: the real cause"),
    ],
)
def test_a_fault_is_told_of(build_worker: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build_worker is tied:  # wait for its death, however late
        monkeypatch.setattr(ChildProcesses, "grace_seconds", SECONDS)
    executor = make_executor(build_worker, start_workers=start_alone)
    executor.start()
    pending = executor.submit(orders(1))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=told):
        pending.result()
    assert time.monotonic() - start < SECONDS
    executor.close()


def test_a_bad_log_call_stops_nobody() -> None:
    executor = make_executor(clumsy, start_workers=start_alone)
    executor.start()
    assert executor.submit(orders(7)).result().tokens[0] == 7
    executor.close()


def test_a_rank_that_cannot_be_spawned_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ChildProcess] = []

    def start_child(module: str, *numbers: int) -> ChildProcess:
        if started:
            raise OSError("no more processes")
        started.append(real_start_child(module, *numbers))
        return started[0]

    real_start_child = supervisor.start_child
    monkeypatch.setattr(supervisor, "start_child", start_child)
    executor = make_executor(obedient)
    with pytest.raises(OSError, match="no more processes"):
        executor.start()
    assert started[0].process.poll() is not None
    assert started[0].channel.connection.closed


@pytest.mark.slow
def test_flags_of_the_interpreter_reach_the_workers(tmp_path: Path) -> None:
    """-I ignores PYTHONPATH, which may contain code that no process should run."""
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


MOVES_AWAY = """
import os
import nanovllm, tests.parallel.workers as workers
os.chdir("/")
executor = workers.make_executor()
executor.start()
print("started")
executor.close()
"""
SETS_A_TIMEOUT = """
import socket
from tests.parallel.workers import make_executor, orders
socket.setdefaulttimeout(60)
executor = make_executor()
executor.start()
print(executor.submit(orders(7)).result().tokens[0])
executor.close()
"""
# Torch is imported only once.
FORK_EACH = """
import json, os, sys
import nanovllm.parallel.multiproc_executor
for source in json.load(sys.stdin):
    if os.fork() == 0:
        exec(source)
        sys.exit()
    os.wait()
"""


@pytest.mark.slow
def test_programs_with_other_manners() -> None:
    """Without our precautions, each program would search the wrong folder or hang."""
    says = {MOVES_AWAY: "started", SETS_A_TIMEOUT: "7"}
    done = subprocess.run(
        [sys.executable, "-c", FORK_EACH],
        input=json.dumps([*says]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.splitlines() == [*says.values()], done.stderr
