"""Workers as actors of a Ray cluster; Ray starts them and transports the messages.

They run the same loop as workers in child processes, with queues instead of sockets.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, WorkerError
from nanovllm.parallel.child import (
    Failure,
    Kind,
    Message,
    QueueLink,
    StepTimer,
    forward_logs,
    reporting,
)
from nanovllm.parallel.multiproc_executor import Workers, log_level, worker_name
from nanovllm.parallel.rendezvous import host_store
from nanovllm.parallel.supervisor import STOP_SECONDS, reported_failure
from nanovllm.parallel.worker_main import RendezvousInfo, serve

WAIT_SECONDS = 30.0  # time between log messages while the cluster is busy
HEARTBEAT_SECONDS = 1.0

logger = logging.getLogger(__name__)


def connect(address: str | None = None) -> None:
    """Connect to Ray at `address` or $RAY_ADDRESS, else to a local cluster, else start one."""
    if ray.is_initialized():
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "" if address is None else f" at {address!r}"
        text = f"cannot connect to a Ray cluster{where}: {error}; `ray start --head` starts one"
        raise ConfigError(text) from error


def start_actors(config: EngineConfig) -> Workers:
    """Start workers on the cluster as soon as it has resources for all of them."""
    connect()
    num_ranks, found = config.tensor_parallel_size, ray.cluster_resources()
    kind = "GPU" if config.device != "cpu" and found.get("GPU", 0) >= 1 else "CPU"
    if found.get(kind, 0) < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs as many {kind}s, but the Ray cluster has only "
            f"{found.get(kind, 0):g}"
        )
    group = placement_group([{kind: 1}] * num_ranks, strategy="PACK")
    children = RankActors([worker_name(rank, num_ranks) for rank in range(num_ranks)], group)
    try:
        while not group.wait(WAIT_SECONDS):
            logger.warning("waiting for %d free %ss on the Ray cluster", num_ranks, kind)
        children.start(num_gpus=1 if kind == "GPU" else 0)
        host, port = ray.get(children.actors[0].meet.remote())
    except BaseException as error:  # including Ctrl-C
        children.stop()
        if isinstance(error, RayError):
            raise WorkerError(f"{children.names[0]} is lost: {error}") from error
        raise
    return Workers(children, RendezvousInfo(host, port, num_threads=1, has_one_device=True))


class ActorLink(QueueLink):
    def send(self, kind: Kind, record: object) -> None:
        super().send(kind, record)
        if kind is Kind.ERROR:  # the process exits after this
            time.sleep(STOP_SECONDS)  # give Ray time to fetch the message first


class RankActor:
    """A worker in a process that Ray starts, and ends when the engine's process ends."""

    def __init__(self, rank: int, level: int) -> None:
        self._link = ActorLink()
        self._early: dict[int, bytes] = {}  # messages that arrived out of order, keyed by number
        self._num_in = 0
        self._timer = StepTimer()
        forward_logs(self._link, level)
        threading.Thread(target=self._serve, args=[rank], daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def meet(self) -> tuple[str, int]:
        """Host the rendezvous store in this process, and return its address."""
        host = get_node_ip_address()
        self._store = host_store(host)
        return host, self._store.port

    def put(self, number: int, packed: bytes) -> None:
        """Queue a message in order: Ray may deliver a small message before a large one."""
        self._early[number] = packed
        while self._num_in in self._early:
            self._link.inbox.put(self._early.pop(self._num_in))
            self._num_in += 1

    def take(self) -> bytes:
        """Return the next message for the engine."""
        return self._link.outbox.get()

    def _serve(self, rank: int) -> None:
        with reporting(self._link):
            serve(rank, self._link, self._timer)

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            self._link.send(Kind.HEARTBEAT, self._timer.seconds())


class RankActors:
    """Worker actors as children of a supervisor; Ray itself detects lost actors."""

    heartbeat_timeout = math.inf
    grace_seconds = 1.0  # wait for Ray to report the death that caused another worker's error

    def __init__(self, names: Sequence[str], group: Any) -> None:
        self.names = names
        self.actors: list[Any] = []
        self._group = group  # placement group that reserves the actors' resources
        self._num_sent = 0
        self._awaited: dict[Any, int] = {}  # ObjectRef of a rank's next message -> rank

    def start(self, num_gpus: int) -> None:
        actors = ray.remote(concurrency_groups={"out": 1})(RankActor)
        for rank in range(len(self.names)):
            place = PlacementGroupSchedulingStrategy(self._group, rank)
            options = actors.options(
                num_gpus=num_gpus, num_cpus=1 - num_gpus, scheduling_strategy=place
            )
            self.actors.append(options.remote(rank, log_level(rank)))
            self._take(rank)

    def send(self, packed: bytes) -> None:
        for actor in self.actors:
            actor.put.remote(self._num_sent, packed)
        self._num_sent += 1

    def receive(self, seconds: float) -> list[tuple[int, Message | Failure]]:
        ready, _ = ray.wait(list(self._awaited), timeout=seconds)
        return [self._receive(reference) for reference in ready]

    def stop(self) -> None:
        if ray.is_initialized():  # False while the interpreter shuts down
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self._group)

    def close(self) -> None:
        pass

    def _take(self, rank: int) -> None:
        """Request the next message of a worker."""
        reference = self.actors[rank].take.options(concurrency_group="out").remote()
        self._awaited[reference] = rank

    def _receive(self, reference: Any) -> tuple[int, Message | Failure]:
        rank = self._awaited.pop(reference)
        try:
            kind, record = pickle.loads(ray.get(reference))
        except RayError as error:
            return rank, Failure(f"{self.names[rank]} is lost: {error}")
        self._take(rank)
        if kind is Kind.ERROR:  # use this machine's clock: the clocks of machines differ
            return rank, replace(reported_failure(self.names[rank], record), time=time.monotonic())
        return rank, (kind, record)
