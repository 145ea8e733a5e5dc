"""Workers without a model: the first column of a plan has orders.

Only workers that join a process group import torch; the others start immediately.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.errors import ConfigError
from nanovllm.parallel.worker_main import RendezvousInfo, WorkerTask

if TYPE_CHECKING:
    from nanovllm.ops.tp_group import TPGroup
    from nanovllm.parallel.multiproc_executor import MultiprocExecutor, Workers

logger = logging.getLogger("nanovllm.stand_in")
NUM_EXTRA = 4


class Order(IntEnum):
    """Orders to workers; each comes with the rank that executes it."""

    ANSWER = 0
    RAISE = 1
    DIE = 2
    SLEEP = 3
    MEET = 4  # all ranks run a collective, except the given rank, which sleeps
    RAISE_LATE = 5  # raise when the tokens are waited for
    STAY = 6  # ignore the request to exit


@dataclass(frozen=True)
class Done:
    tokens: np.ndarray

    def result(self) -> StepResult:
        if self.tokens[0] == Order.RAISE_LATE and len(self.tokens) == 2 + NUM_EXTRA:
            raise ValueError("no such token")
        return StepResult(self.tokens)


class ObedientWorker:
    """Returns the plan's slots as tokens, followed by facts about its process."""

    def __init__(self, rank: int, meet: Callable[[], None], num_threads: int = 0) -> None:
        self.rank, self.meet, self.num_threads = rank, meet, num_threads

    def start(self) -> ExecutorInfo:
        logger.info("the pool of rank %d", self.rank)
        logger.warning("rank %d is no model", self.rank)
        return ExecutorInfo(100 - self.rank, 1, "cpu", "float32")

    def submit(self, plan: StepPlan) -> Done:
        if len(plan.slots) == 2:
            self._obey(*plan.slots.tolist())
        num_tokens = sum(int(row.token_ids.sum(dtype=np.int64)) for row in plan.new_rows) % 2**31
        extra = [os.getpid(), os.getsid(0), self.num_threads, num_tokens]
        return Done(np.array([*plan.slots, *extra]))

    def _obey(self, order: int, rank: int) -> None:
        if order == Order.MEET and rank != self.rank:
            self.meet()
        if rank != self.rank:
            return
        if order == Order.RAISE:
            raise ValueError(f"rank {rank} was told to raise")
        if order == Order.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if order in (Order.SLEEP, Order.MEET):
            time.sleep(1000)
        if order == Order.STAY:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def obedient(task: WorkerTask, rank: int) -> ObedientWorker:
    return ObedientWorker(rank, meet=lambda: None)


def meeting(task: WorkerTask, rank: int) -> ObedientWorker:
    import torch

    from nanovllm.parallel.worker_main import join_group

    group = join_group(task, rank)
    return ObedientWorker(rank, lambda: check_sum(group), torch.get_num_threads())


def check_sum(group: TPGroup) -> None:
    import torch

    assert group.all_reduce(torch.ones(1)).item() == group.size


def raising(task: WorkerTask, rank: int) -> ObedientWorker:
    """Build workers of which the last one raises while rank 0 waits for it."""
    if rank == task.config.tensor_parallel_size - 1:
        raise ValueError("this worker cannot be built")
    return meeting(task, rank)


def refusing(task: WorkerTask, rank: int) -> ObedientWorker:
    raise ConfigError("no room; lower num_kvcache_blocks")


def dying(task: WorkerTask, rank: int) -> ObedientWorker:
    if rank == task.config.tensor_parallel_size - 1:
        os._exit(7)
    return meeting(task, rank)


def sleeping(task: WorkerTask, rank: int) -> ObedientWorker:
    time.sleep(1000)
    raise AssertionError


def forbid_what_was_said(output_token_ids: list[int], logits: Any) -> Any:
    """A logits processor, in a module that workers import fast."""
    logits[output_token_ids] = -math.inf
    return logits


ALONE = (obedient, refusing, sleeping)


def start_alone(config: EngineConfig) -> Workers:
    """Start workers that do not join a process group."""
    from nanovllm.parallel.multiproc_executor import Workers, start_children

    return Workers(start_children(config.tensor_parallel_size), RendezvousInfo("127.0.0.1", 0, 1))


def make_executor(
    build_worker: Callable[..., Any] = obedient, size: int = 2, **options: Any
) -> MultiprocExecutor:
    from nanovllm.parallel.multiproc_executor import MultiprocExecutor
    from nanovllm.parallel.multiproc_executor import start_workers as start_processes

    start_workers = options.pop("start_workers", None)
    if start_workers is None:  # without a process group, torch is not needed here either
        start_workers = start_alone if build_worker in ALONE else start_processes
    config = EngineConfig("none", tensor_parallel_size=size, device="cpu", **options)
    nothing: Any = None
    return MultiprocExecutor(config, nothing, nothing, build_worker, start_workers)


def orders(*numbers: int) -> StepPlan:
    column = np.array(numbers, np.int32)
    return StepPlan(column, column, column, column, [], [], [], 0)


def process_ids(executor: MultiprocExecutor) -> list[int]:
    """Return the process ids of a started executor; of a starting one, none or all."""
    return [] if executor.supervisor is None else executor.supervisor._children.pids
