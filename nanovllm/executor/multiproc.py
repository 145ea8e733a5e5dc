"""A worker process for every rank; each gets the same plans, and the first one answers."""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import Executor, ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.channel import Kind, pack
from nanovllm.executor.child import Failure
from nanovllm.executor.supervisor import ChildProcesses, Children, Supervisor
from nanovllm.executor.worker_main import Site, WorkerTask, build_worker
from nanovllm.pending import Pending

Reply = Future[bytearray]


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers that were just started, and where they meet."""

    children: Children
    site: Site
    store: object = None  # of their rendezvous, which lasts as long as it is held


def start_processes(config: EngineConfig) -> Workers:
    """Start workers on this machine."""
    import torch

    from nanovllm.devices.choose import check_num_ranks
    from nanovllm.distributed.store import HOST, host_store

    num_ranks = config.tensor_parallel_size
    check_num_ranks(config.device, num_ranks)
    store = host_store()
    num_threads = max(torch.get_num_threads() // num_ranks, 1)
    return Workers(start_children(num_ranks), Site(HOST, store.port, num_threads), store)


def start_children(num_ranks: int) -> ChildProcesses:
    return ChildProcesses(
        "nanovllm.executor.worker_main",
        [worker_name(rank, num_ranks) for rank in range(num_ranks)],
        [(log_level(rank), rank) for rank in range(num_ranks)],
    )


def worker_name(rank: int, num_ranks: int) -> str:
    return f"worker {rank} of {num_ranks}"


def log_level(rank: int) -> int:
    """Ranks after the first would mostly repeat its messages."""
    level = logging.getLogger("nanovllm").getEffectiveLevel()
    return level if rank == 0 else max(level, logging.WARNING)


class MultiprocExecutor:
    """Once a worker raised or died, every call raises the error that says so."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        build_worker: Callable[[WorkerTask, int], Executor] = build_worker,
        start_workers: Callable[[EngineConfig], Workers] = start_processes,
    ) -> None:
        self._config, self._model_config, self._checkpoint = config, model_config, checkpoint
        self._build_worker, self._start_workers = build_worker, start_workers
        self._replies = Replies(config.tensor_parallel_size)
        self.supervisor: Supervisor | None = None  # before the start
        self._workers: Workers | None = None

    def start(self) -> ExecutorInfo:
        self._workers = self._start_workers(self._config)
        self.supervisor = Supervisor(
            self._workers.children,
            self._replies.on_reply,
            self._replies.on_failure,
            self._config.step_timeout,
        )
        weakref.finalize(self, self.supervisor.close)  # when it is dropped, or Python exits
        try:
            task = WorkerTask(
                self._config,
                self._model_config,
                self._checkpoint,
                self._workers.site,
                self._build_worker,
            )
            awaited = self._send(pickle.dumps(task), self._config.tensor_parallel_size)
            infos: list[ExecutorInfo] = [pickle.loads(reply.result()) for reply in awaited]
        except BaseException:  # Ctrl-C while the model loads
            self.close()
            raise
        self.supervisor.is_armed = True
        return infos[0]  # they agreed

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        (reply,) = self._send(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))
        return Pending(lambda: pickle.loads(reply.result()))

    def sample(self, masks: IntColumn) -> None:
        self._send(masks.data, num_replies=0)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return np.empty((num_rows, num_words), np.int32)

    def capture_one(self) -> bool:
        return False  # workers captured all of them at their start

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
        self._workers = None  # a traceback may keep this object, and must not keep the store

    def _send(self, body: bytes | memoryview, num_replies: int = 1) -> list[Reply]:
        """Send all workers the same; the first ranks will reply."""
        assert self.supervisor is not None, "used before its start"
        replies = self._replies.expect(num_replies)
        self.supervisor.send(pack(Kind.TASK, body))
        return replies


class Replies:
    """Replies that workers owe, in the order of the messages that they answer."""

    def __init__(self, num_ranks: int) -> None:
        self._awaited: list[deque[Reply]] = [deque() for _ in range(num_ranks)]
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def expect(self, num_replies: int) -> list[Reply]:
        """Expect a reply of each of the first ranks."""
        replies = [Reply() for _ in range(num_replies)]
        with self._lock:
            if self._failure is not None:
                raise self._failure.error()
            for awaited, reply in zip(self._awaited, replies, strict=False):
                awaited.append(reply)
        return replies

    def on_reply(self, rank: int, body: bytearray) -> None:
        self._awaited[rank].popleft().set_result(body)

    def on_failure(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
        for awaited in self._awaited:
            while awaited:
                awaited.popleft().set_exception(failure.error())
