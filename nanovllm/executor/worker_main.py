"""What a worker process does: build one rank's worker, then answer plans until the engine is gone.

Importing this file must stay quick: until it is done, nobody notices that the engine died.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.step import ExecutorInfo, IntColumn, StepPlan, StepResult
from nanovllm.executor.channel import Channel, Kind, pack
from nanovllm.executor.codec import decode_plan, encode_result
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
class WorkerTask:
    """All that the workers of one engine need to begin."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint
    store_port: int  # where they meet
    num_threads: int  # on a CPU, of each
    log_level: int
    build_worker: Callable[[WorkerTask, int], RankWorker]


def main(rank: int, fd: int, parent_pid: int) -> None:
    os.set_inheritable(fd, False)  # or a child of this process could hide its death
    channel = Channel(socket.socket(fileno=fd))
    watch = threading.Thread(target=_exit_with_parent, args=(fd, parent_pid), daemon=True)
    watch.start()
    with _reporting(channel):
        _serve(rank, channel)
    os._exit(0)


def _exit_with_parent(fd: int, parent_pid: int) -> None:
    """End the process, whatever it is doing, when the engine's end of the socket closes."""
    poll = select.poll()
    poll.register(fd, 0)  # only a hang-up
    # A process forked from the engine's may keep that end open, hence the second sign.
    while os.getppid() == parent_pid and not poll.poll(1000):
        pass
    os._exit(1)


@contextmanager
def _reporting(channel: Channel) -> Iterator[None]:
    """Let the engine know of an error, and end; other ranks may wait for this one in vain."""
    try:
        yield
    except BaseException as error:
        try:
            report = {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "time": time.monotonic(),  # the same clock for all processes
            }
            channel.send(pack(Kind.ERROR, [json.dumps(report).encode()]))
        finally:  # whatever else fails, nobody may wait for this rank
            os._exit(1)


def _serve(rank: int, channel: Channel) -> None:
    message = channel.receive()
    if message is None:
        return
    task: WorkerTask = pickle.loads(message.body)
    _forward_logs(rank, channel, task.log_level)
    worker = task.build_worker(task, rank)
    info = worker.start()
    gc.collect()
    gc.freeze()  # a full collection would walk all that was imported, amid a step
    channel.send(pack(Kind.REPLY, [json.dumps(asdict(info)).encode()]))

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


def _answer(launched: SimpleQueue[Pending[StepResult]], channel: Channel) -> None:
    with _reporting(channel):
        while True:
            channel.send(pack(Kind.REPLY, encode_result(launched.get().result())))


def _forward_logs(rank: int, channel: Channel, level: int) -> None:
    """Log where the engine does; ranks after the first would mostly repeat what it says."""
    logger = logging.getLogger("nanovllm")
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.addHandler(_ChannelHandler(channel))


class _ChannelHandler(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
            entry = {"name": record.name, "level": record.levelno, "message": message}
            self._channel.send(pack(Kind.LOG, [json.dumps(entry).encode()]))
        except Exception:  # what is logged never stops a program
            self.handleError(record)
