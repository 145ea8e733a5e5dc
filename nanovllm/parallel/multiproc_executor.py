"""An executor with a worker process per rank: all get the same plans, and rank 0 sends results."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.executor import Executor, ExecutorInfo
from nanovllm.engine.step import Bitmasks, IntColumn, Pending, StepPlan, StepResult
from nanovllm.parallel.child import Failure
from nanovllm.parallel.supervisor import ChildProcesses, Children, Supervisor
from nanovllm.parallel.worker_main import RendezvousInfo, WorkerTask


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers that were just started, and their rendezvous info."""

    children: Children
    rendezvous: RendezvousInfo
    store: object = None  # this reference keeps the rendezvous store alive


def start_workers(config: EngineConfig) -> Workers:
    """Start workers on this machine, or on a Ray cluster."""
    if config.distributed_executor_backend == "ray":
        from nanovllm.parallel.ray_workers import start_actors

        return start_actors(config)
    import torch

    from nanovllm.parallel.rendezvous import HOST, host_store

    num_ranks = config.tensor_parallel_size
    store = host_store()
    num_threads = max(torch.get_num_threads() // num_ranks, 1)
    return Workers(start_children(num_ranks), RendezvousInfo(HOST, store.port, num_threads), store)


def start_children(num_ranks: int) -> ChildProcesses:
    return ChildProcesses(
        "nanovllm.parallel.worker_main",
        [worker_name(rank, num_ranks) for rank in range(num_ranks)],
        [(log_level(rank), rank) for rank in range(num_ranks)],
    )


def worker_name(rank: int, num_ranks: int) -> str:
    return f"worker {rank} of {num_ranks}"


def log_level(rank: int) -> int:
    """Return the log level of a rank: ranks above 0 log only warnings, to avoid duplicates."""
    level = logging.getLogger("nanovllm").getEffectiveLevel()
    return level if rank == 0 else max(level, logging.WARNING)


class MultiprocExecutor:
    """Runs steps in worker processes; after a worker fails, every call raises its error."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        build_worker: Callable[[WorkerTask, int], Executor],  # called in each worker process
        start_workers: Callable[[EngineConfig], Workers] = start_workers,
    ) -> None:
        self._config, self._model_config, self._checkpoint = config, model_config, checkpoint
        self._build_worker, self._start_workers = build_worker, start_workers
        self._replies: SimpleQueue[tuple[int, Any] | Failure] = SimpleQueue()  # (rank, reply)
        self.supervisor: Supervisor | None = None  # None before `start`
        self._workers: Workers | None = None

    def start(self) -> ExecutorInfo:
        config, replies = self._config, self._replies
        self._workers = self._start_workers(config)
        self.supervisor = Supervisor(
            self._workers.children,
            lambda rank, reply: replies.put((rank, reply)),
            replies.put,
            config.step_timeout,
        )
        # Close the workers when this object is garbage-collected or Python exits.
        weakref.finalize(self, self.supervisor.close)
        try:
            rendezvous, build = self._workers.rendezvous, self._build_worker
            self._send(WorkerTask(config, self._model_config, self._checkpoint, rendezvous, build))
            infos = dict(self._take_reply() for _ in range(config.tensor_parallel_size))
        except BaseException:  # including Ctrl-C while the model loads
            self.close()
            raise
        self.supervisor.is_armed = True
        info: ExecutorInfo = infos[0]  # the same on all ranks
        return info

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step; take each result once, in the order of the plans."""
        self._send(plan)
        return Pending(lambda: self._take_reply()[1])

    def sample(self, bitmasks: Bitmasks) -> None:
        self._send(bitmasks)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return np.empty((num_rows, num_words), np.int32)

    def capture_one(self) -> bool:
        return False  # workers capture all graphs when they start

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
        self._workers = None  # free the store even if a traceback keeps this object alive

    def _send(self, record: object) -> None:
        """Send the same message to all workers."""
        assert self.supervisor is not None, "used before start()"
        self.supervisor.send(record)

    def _take_reply(self) -> tuple[int, Any]:
        reply = self._replies.get()
        if isinstance(reply, Failure):
            self._replies.put(reply)  # for all other waiters and later calls
            raise reply.error()
        return reply
