"""Several ranks in threads of one process, connected by gloo, or one rank with NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from nanovllm import assembly
from nanovllm.assembly import create_parts
from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.choose import create_device
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.step import Bitmasks, IntColumn, StepPlan, StepResult
from nanovllm.ops.tp_group import TPGroup
from nanovllm.parallel.rendezvous import connect
from nanovllm.worker.device_interface import Device
from nanovllm.worker.worker import Worker

TIMEOUT = timedelta(seconds=60)
T = TypeVar("T")
MakeDevice = Callable[[EngineConfig, TPGroup], Device]


class Ranks:
    """One thread per rank, each of which runs its tasks in order."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(size)]
        store = torch.distributed.HashStore()
        self.groups = self.run(lambda rank: connect(rank, size, store, backend, TIMEOUT))

    def submit(self, function: Callable[[int], T]) -> list[Future[T]]:
        return [thread.submit(function, rank) for rank, thread in enumerate(self.threads)]

    def run(self, function: Callable[[int], T]) -> list[T]:
        return [future.result() for future in self.submit(function)]

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


@dataclass(frozen=True)
class PendingOnAll:
    steps: list[Future[Any]]

    def result(self) -> StepResult:
        """Wait for every rank; all of them return the same tokens."""
        results: list[StepResult] = [step.result().result() for step in self.steps]
        assert all((other.tokens == results[0].tokens).all() for other in results)
        return results[0]


class ThreadedExecutor:
    """An executor with one worker per rank."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        size: int,
        backend: str = "gloo",
        make_device: MakeDevice = create_device,
    ) -> None:
        self.ranks = Ranks(size, backend)

        def make(rank: int) -> Worker:
            device = make_device(config, self.ranks.groups[rank])
            parts = create_parts(config, model_config, checkpoint)
            return Worker(config, model_config, checkpoint, device, parts)

        self.workers = self.ranks.run(make)

    @property
    def runner(self) -> Any:
        return self.workers[0].runner

    def start(self) -> ExecutorInfo:
        infos = self.ranks.run(lambda rank: self.workers[rank].start())
        assert all(info == infos[0] for info in infos)
        return infos[0]

    def submit(self, plan: StepPlan) -> PendingOnAll:
        return PendingOnAll(self.ranks.submit(lambda rank: self.workers[rank].submit(plan)))

    def sample(self, bitmasks: Bitmasks) -> None:
        self.ranks.run(lambda rank: self.workers[rank].sample(bitmasks))

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return np.empty((num_rows, num_words), np.int32)

    def capture_one(self) -> bool:
        return False

    def close(self) -> None:
        self.ranks.close()
        self.workers[0].device.release()


@contextmanager
def engines_of(
    size: int, backend: str = "gloo", make_device: MakeDevice = create_device
) -> Iterator[None]:
    """Make new engines run on `size` ranks."""
    tqdm.set_lock(threading.RLock())  # an interrupt in another test may have left it locked
    executor = partial(ThreadedExecutor, size=size, backend=backend, make_device=make_device)
    with mock.patch.object(assembly, "create_executor", executor):
        yield
