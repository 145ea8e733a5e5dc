"""What a worker process does: build one rank's worker, then answer plans until the engine is gone.

Importing this file must stay quick: until it is done, nobody notices that the engine died.
"""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.channel import Kind, Link, pack
from nanovllm.executor.child import forward_logs, reporting, run_child
from nanovllm.executor.codec import decode_plan
from nanovllm.pending import Pending


class RankWorker(Protocol):
    """What `worker.worker.Worker` is to this file, which does not import torch."""

    def start(self) -> ExecutorInfo:
        """Build model and cache."""

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Launch a step."""

    def sample(self, masks: IntColumn) -> None:
        """Launch the rest of a step with masked rows."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where the workers of one engine are."""

    host: str
    port: int  # on that host, where they meet
    num_threads: int  # on a CPU, of each
    has_one_device: bool = False  # each sees its own alone; otherwise all see those of all


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """All that the workers of one engine need to begin."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint
    site: Site
    log_level: int
    build_worker: Callable[[WorkerTask, int], RankWorker]


def main(fd: int, parent_pid: int, rank: int) -> None:
    run_child(fd, parent_pid, lambda channel, _: serve(rank, channel))


def serve(rank: int, channel: Link) -> None:
    """Do what the engine at the other end asks for, until it is gone."""
    message = channel.receive()
    if message is None:
        return
    task: WorkerTask = pickle.loads(message.body)
    # Ranks after the first would mostly repeat what it says.
    level = task.log_level if rank == 0 else max(task.log_level, logging.WARNING)
    forward_logs(channel, level)
    worker = task.build_worker(task, rank)
    info = worker.start()
    gc.collect()
    gc.freeze()  # a full collection would walk all that was imported, amid a step
    channel.send(pack(Kind.REPLY, [pickle.dumps(info)]))

    launched: SimpleQueue[Pending[StepResult]] = SimpleQueue()
    if rank == 0:
        # A thread of its own, so that the next step is launched while this one is waited for.
        threading.Thread(target=_answer, args=(launched, channel), daemon=True).start()
    while (message := channel.receive()) is not None:
        plan = decode_plan(message.body)
        pending = worker.run(plan)
        if len(plan.masked_rows):
            message = channel.receive()  # what follows such a plan are its masks
            if message is None:
                return
            worker.sample(np.frombuffer(message.body, np.int32).reshape(len(plan.masked_rows), -1))
        if rank == 0:
            launched.put(pending)


def _answer(launched: SimpleQueue[Pending[StepResult]], channel: Link) -> None:
    with reporting(channel):
        while True:
            result = pickle.dumps(launched.get().result(), pickle.HIGHEST_PROTOCOL)
            channel.send(pack(Kind.REPLY, [result]))
