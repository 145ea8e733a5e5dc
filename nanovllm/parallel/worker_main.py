"""A worker process: builds the worker of one rank, then runs plans until the engine exits.

Importing this module must stay fast: during the import, the engine's death goes unnoticed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.executor import Executor
from nanovllm.engine.step import Bitmasks, Pending, StepResult
from nanovllm.parallel.child import Kind, Link, StepTimer, reporting, run_child

if TYPE_CHECKING:
    from nanovllm.ops.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """How the workers of one engine find each other, and the resources of each."""

    host: str
    port: int  # port of the rendezvous store on the host
    num_threads: int  # CPU threads per worker
    has_one_device: bool = False  # whether each worker sees only its own device


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """Everything that the workers of one engine need to start."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint
    rendezvous: RendezvousInfo
    build_worker: Callable[[WorkerTask, int], Executor]


def main(fd: int, parent_pid: int, log_level: int, rank: int) -> None:
    run_child(fd, parent_pid, log_level, lambda channel, timer: serve(rank, channel, timer))


def serve(rank: int, link: Link, timer: StepTimer) -> None:
    """Build and start the worker, then run the engine's plans until the link is closed."""
    task: WorkerTask | None = link.receive()
    if task is None:
        return
    worker = task.build_worker(task, rank)
    info = worker.start()
    gc.collect()
    gc.freeze()  # otherwise a full collection in a step would scan all imported modules
    link.send(Kind.REPLY, info)

    launched: SimpleQueue[Pending[StepResult]] = SimpleQueue()
    if rank == 0:
        # A separate thread waits for results, so that this one can launch the next step.
        threading.Thread(target=_send_results, args=(launched, link, timer), daemon=True).start()
    while (plan := link.receive()) is not None:
        with timer:
            pending = worker.submit(plan)
        if plan.needs_bitmasks:
            bitmasks: Bitmasks | None = link.receive()  # they follow the plan
            if bitmasks is None:
                return
            worker.sample(bitmasks)
        if rank == 0:
            launched.put(pending)


def _send_results(launched: SimpleQueue[Pending[StepResult]], link: Link, timer: StepTimer) -> None:
    with reporting(link):
        while True:
            pending = launched.get()
            with timer:
                result = pending.result()
            link.send(Kind.REPLY, result)


def join_group(task: WorkerTask, rank: int) -> TPGroup:
    """Set up the rank's device and join the process group; freeing the result leaves the group."""
    import torch

    from nanovllm.devices.ranks import claim_device
    from nanovllm.parallel.rendezvous import TIMEOUT, connect, join_store, own_address

    rendezvous, size = task.rendezvous, task.config.tensor_parallel_size
    torch.set_num_threads(rendezvous.num_threads)
    backend = claim_device(task.config.device, 0 if rendezvous.has_one_device else rank)
    store = join_store(rendezvous.host, rendezvous.port)
    address = own_address(rendezvous.host, rendezvous.port)
    return connect(rank, size, store, backend, TIMEOUT, address)
