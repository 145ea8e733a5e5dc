"""Workers on the machines of a Ray cluster, which starts them and carries the messages.

They run the same loop as those of one machine; messages go through queues in place of a socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.distributed.store import host_store
from nanovllm.errors import ConfigError
from nanovllm.executor.channel import Kind, Message, unpack
from nanovllm.executor.child import reporting
from nanovllm.executor.child_process import STOP_SECONDS, Failure, hear
from nanovllm.executor.codec import Section
from nanovllm.executor.worker_main import Site, serve
from nanovllm.executor.worker_processes import Reply, join_failures

WAIT_SECONDS = 30.0  # between words about a cluster that is busy
# For Ray to tell of the death that explains another worker's error.
GRACE_SECONDS = 1.0

logger = logging.getLogger(__name__)


def connect(address: str | None = None) -> None:
    """Join a cluster: the given one, that of $RAY_ADDRESS, the one that runs here, or a new one."""
    if ray.is_initialized():
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "" if address is None else f" at {address!r}"
        text = f"no Ray cluster can be reached{where}: {error}; `ray start --head` starts one"
        raise ConfigError(text) from error


class QueueLink:
    """A worker's end of what Ray carries."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._early: dict[int, bytes] = {}  # by number: what came before its turn
        self._num_in = 0
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._is_told = threading.Event()  # an error is, once somebody asks for what comes next

    def put(self, number: int, body: bytes) -> None:
        self._early[number] = body
        while self._num_in in self._early:
            body = self._early.pop(self._num_in)
            self._num_in += 1
            self._inbox.put(Message(Kind.TASK, bytearray(body)))

    def take(self, is_after_error: bool) -> bytes:
        if is_after_error:
            self._is_told.set()
        return self._outbox.get()

    def receive(self) -> Message:
        return self._inbox.get()

    def send(self, packed: bytes) -> None:
        self._outbox.put(packed)
        if unpack(packed).kind is Kind.ERROR:  # after which the process ends
            self._is_told.wait(STOP_SECONDS)


class RankActor:
    """A worker in a process that Ray started, and which ends with the engine's."""

    def __init__(self, rank: int) -> None:
        self._link = QueueLink()
        threading.Thread(target=self._serve, args=[rank], daemon=True).start()

    def _serve(self, rank: int) -> None:
        with reporting(self._link):
            serve(rank, self._link)

    def meet(self) -> tuple[str, int]:
        """Let the ranks meet here, as long as this process is there."""
        host = get_node_ip_address()
        self._store = host_store(host)
        return host, self._store.port

    def put(self, number: int, body: bytes) -> None:
        self._link.put(number, body)

    def take(self, is_after_error: bool = False) -> bytes:
        return self._link.take(is_after_error)


@dataclass(frozen=True, slots=True)
class RayWorker:
    name: str
    actor: Any
    awaited: deque[Reply] = field(default_factory=deque)  # in the order of its tasks

    def take(self, is_after_error: bool = False) -> Any:
        """Ask for the next message; returns Ray's reference to it."""
        return self.actor.take.options(concurrency_group="out").remote(is_after_error)


class RayWorkers:
    """A thread hears what they say, so that a fault is noticed while nobody waits."""

    def __init__(self) -> None:
        self._failure: Failure | None = None
        self._workers: list[RayWorker] = []
        self._group: Any = None  # the places that Ray keeps for them
        self._kind = "CPU"
        self._num_sent = 0
        self._lock = threading.RLock()  # of all of these
        self._thread = threading.Thread(
            target=self._receive_all, name="nanovllm-ray-workers", daemon=True
        )

    def check_room(self, device: str, num_ranks: int) -> None:
        connect()
        found = ray.cluster_resources()
        self._kind = "GPU" if device != "cpu" and found.get("GPU", 0) >= 1 else "CPU"
        if found.get(self._kind, 0) < num_ranks:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks} needs as many {self._kind}s, and the Ray "
                f"cluster has {found.get(self._kind, 0):g}"
            )

    def spawn(self, num_ranks: int) -> Site:
        self.raise_if_failed()
        self._group = placement_group([{self._kind: 1}] * num_ranks, strategy="PACK")
        while not self._group.wait(WAIT_SECONDS):
            logger.warning("waiting for %d free %ss of the Ray cluster", num_ranks, self._kind)
        actors = ray.remote(concurrency_groups={"out": 1})(RankActor)
        num_gpus = 1 if self._kind == "GPU" else 0
        for rank in range(num_ranks):
            place = PlacementGroupSchedulingStrategy(self._group, rank)
            actor = actors.options(
                num_gpus=num_gpus, num_cpus=1 - num_gpus, scheduling_strategy=place
            )
            self._workers.append(RayWorker(f"worker {rank} of {num_ranks}", actor.remote(rank)))
        self._thread.start()
        try:
            host, port = ray.get(self._workers[0].actor.meet.remote())
        except RayError as error:
            self.fail(f"{self._workers[0].name} is lost: {error}")
            self.raise_if_failed()
            raise
        return Site(host, port, num_threads=1, has_one_device=True)

    def send(self, sections: Iterable[Section], num_replies: int = 1) -> list[Reply]:
        body, replies = b"".join(sections), [Reply() for _ in range(num_replies)]
        with self._lock:
            self.raise_if_failed()
            for worker, reply in zip(self._workers, replies, strict=False):
                worker.awaited.append(reply)
            for worker in self._workers:
                worker.actor.put.remote(self._num_sent, body)
            self._num_sent += 1
        return replies

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure.error()

    def fail(self, message: str) -> None:
        self._end(Failure(message, "WorkerError"))

    def close(self) -> None:
        self._end(Failure("the engine is closed; make a new one", "EngineError"))
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(STOP_SECONDS)

    def _end(self, failure: Failure) -> None:
        """Tell everybody who waits why, and give back what Ray had set aside; once."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            for worker in self._workers:
                for reply in worker.awaited:
                    reply.set_exception(failure.error())
        if ray.is_initialized():  # not after the interpreter's end began
            for worker in self._workers:
                ray.kill(worker.actor)
            if self._group is not None:
                remove_placement_group(self._group)

    def _receive_all(self) -> None:
        failure = Failure("the engine can no longer listen to its workers", "WorkerError")
        try:
            failure = self._first_failure()
        finally:
            self._end(failure)

    def _first_failure(self) -> Failure:
        """Hand out replies until workers fail; return what came first."""
        failures: list[Failure] = []
        deadline = float("inf")
        awaited = {worker.take(): worker for worker in self._workers}
        while awaited and time.monotonic() < deadline:
            ready, _ = ray.wait(list(awaited), timeout=GRACE_SECONDS if failures else None)
            for reference in ready:
                worker = awaited.pop(reference)
                failure = self._hear(worker, reference)
                if failure is None:
                    awaited[worker.take()] = worker
                else:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return join_failures(failures)

    def _hear(self, worker: RayWorker, reference: Any) -> Failure | None:
        try:
            message = unpack(ray.get(reference))
        except RayError as error:
            return Failure(f"{worker.name} is lost: {error}", "WorkerError")
        if message.kind is Kind.REPLY:
            with self._lock:
                if self._failure is None:
                    worker.awaited.popleft().set_result(message.body)
            return None
        failure = hear(worker, message)
        if failure is None:
            return None
        worker.take(is_after_error=True)
        return replace(failure, time=time.monotonic())  # machines have clocks of their own
