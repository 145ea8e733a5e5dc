"""A worker process for every rank; each gets the same plans, and the first one answers."""

from __future__ import annotations

import logging
import math
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError
from functools import partial

import numpy as np

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.codec import encode_plan
from nanovllm.executor.rank import build_worker
from nanovllm.executor.worker_main import RankWorker, WorkerTask
from nanovllm.executor.worker_processes import Reply, WorkerProcesses, Workers
from nanovllm.pending import Pending

WAIT_SECONDS = 0.25  # after which a pause of this process is noticed


class MultiprocExecutor:
    """Once a worker raised or died, every call raises the error that says so."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        build_worker: Callable[[WorkerTask, int], RankWorker] = build_worker,
        workers: Workers | None = None,  # None: processes of this machine
    ) -> None:
        self._step_timeout = config.step_timeout
        self._workers: Workers = (
            WorkerProcesses(config.step_timeout) if workers is None else workers
        )
        self._workers.check_room(config.device, config.tensor_parallel_size)
        self._num_ranks = config.tensor_parallel_size
        self._task = partial(
            WorkerTask,
            config,
            model_config,
            checkpoint,
            log_level=logging.getLogger("nanovllm").getEffectiveLevel(),
            build_worker=build_worker,
        )
        weakref.finalize(self, self._workers.close)  # when it is dropped, or the interpreter exits

    def start(self) -> ExecutorInfo:
        try:
            task = self._task(site=self._workers.spawn(self._num_ranks))
            replies = self._workers.send([pickle.dumps(task)], self._num_ranks)
            infos: list[ExecutorInfo] = [pickle.loads(reply.result()) for reply in replies]
        except BaseException:  # Ctrl-C while the model loads
            self.close()
            raise
        return infos[0]  # they agreed

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        self._workers.raise_if_failed()
        (reply,) = self._workers.send(encode_plan(plan))
        return Pending(lambda: self._result(reply))

    def _result(self, reply: Reply) -> StepResult:
        try:
            message = wait_for(reply, self._step_timeout)
        except TimeoutError:
            limit = self._step_timeout
            self._workers.fail(f"no worker returned from a step for {limit:g} s: one of them hangs")
            message = reply.result()  # raises
        result: StepResult = pickle.loads(message)
        return result

    def sample(self, masks: IntColumn) -> None:
        self._workers.send([masks.data], num_replies=0)

    def mask_memory(self, num_rows: int, num_words: int) -> IntColumn:
        return np.empty((num_rows, num_words), np.int32)

    def capture_one(self) -> bool:
        return False  # workers captured all of them at their start

    def close(self) -> None:
        self._workers.close()


def wait_for(reply: Reply, seconds: float) -> bytearray:
    """Wait for a reply, with 0 seconds for ever; a pause of this process counts as one wait."""
    for _ in range(math.ceil(seconds / WAIT_SECONDS)):
        try:
            return reply.result(WAIT_SECONDS)
        except TimeoutError:
            pass
    return reply.result(WAIT_SECONDS if seconds else None)
