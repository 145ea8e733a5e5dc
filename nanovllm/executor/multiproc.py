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
from nanovllm.engine.step_clock import StepClock
from nanovllm.executor.codec import encode_plan
from nanovllm.executor.rank import build_worker
from nanovllm.executor.worker_main import RankWorker, WorkerTask
from nanovllm.executor.worker_processes import Reply, WorkerProcesses, Workers
from nanovllm.pending import Pending

# A step that takes longer is taken for hung; somewhat less than a core's front allows the core.
LEAST_SECONDS, TIMES_EXPECTED = 3.5, 8.0
LOOK_SECONDS = 0.25  # between looks at a step that takes long


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
        self._workers: Workers = WorkerProcesses() if workers is None else workers
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
        self._clock: StepClock | None = None  # not before they are started
        weakref.finalize(self, self._workers.close)  # when it is dropped, or the interpreter exits

    def start(self) -> ExecutorInfo:
        try:
            task = self._task(site=self._workers.spawn(self._num_ranks))
            replies = self._workers.send([pickle.dumps(task)], self._num_ranks)
            infos: list[ExecutorInfo] = [pickle.loads(reply.result()) for reply in replies]
        except BaseException:  # Ctrl-C while the model loads
            self.close()
            raise
        self._clock = StepClock(infos[0])  # they agreed
        return infos[0]

    def submit(self, plan: StepPlan) -> Pending[StepResult]:
        self._workers.raise_if_failed()
        assert self._clock is not None, "submit before start"
        self._clock.begin(plan)
        (reply,) = self._workers.send(encode_plan(plan))
        reply.add_done_callback(self._clock.end)
        return Pending(lambda: self._result(reply))

    def _result(self, reply: Reply) -> StepResult:
        assert self._clock is not None
        limit = self._clock.limit(LEAST_SECONDS, TIMES_EXPECTED)
        try:
            message = wait_for(reply, limit)
        except TimeoutError:
            self._workers.fail(f"no worker answered a step for {limit:.1f} s: one of them hangs")
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
    """Wait for a reply; a pause of the whole process or machine counts as one look."""
    for _ in range(math.ceil(seconds / LOOK_SECONDS) - 1):
        try:
            return reply.result(LOOK_SECONDS)
        except TimeoutError:
            pass
    return reply.result(LOOK_SECONDS)
