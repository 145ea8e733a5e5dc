"""Rows of a job, answered by engines on a Ray cluster; those of a lost engine move to another."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.jobs.engine import RowEngine, RowOptions
from nanovllm.jobs.rows import Row

# Engines that may be lost beside all that there were, without a row between them; more are no
# accident.
MAX_LOST = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Where engines go on a cluster."""

    num_engines: int
    each: dict[str, float]  # what Ray sets aside for one, in its own words


def find_room(config: EngineConfig, num_engines: int | None = None) -> Room:
    """Plan as many engines as fit, or as many as are asked for.

    An engine takes a GPU for every rank. Without GPUs it takes the CPUs of the smallest machine, or
    fewer if that many engines are asked for.
    """
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    gpus = [int(each.get("GPU", 0)) for each in resources]
    if config.device != "cpu" and any(gpus):
        fitting = sum(count // num_ranks for count in gpus)
        return _checked(Room(num_engines or max(fitting, 1), {"num_gpus": num_ranks}), fitting)
    cpus = [int(each["CPU"]) for each in resources if each.get("CPU", 0) >= 1]
    least = min(cpus, default=1)
    wanted = num_engines or len(cpus)
    each = max(min(least, sum(cpus) // max(wanted, 1)), 1)
    fitting = sum(count // each for count in cpus)
    return _checked(Room(wanted, {"num_cpus": each}), fitting)


def _checked(room: Room, fitting: int) -> Room:
    if not 1 <= room.num_engines <= fitting:
        needs = ", ".join(f"{name}={count:g}" for name, count in room.each.items())
        raise ConfigError(
            f"the Ray cluster has room for {fitting} engines with {needs} each, "
            f"not for {room.num_engines}"
        )
    return room


class RowActor:
    """An engine in a process that Ray started."""

    async def start(self, options: RowOptions) -> None:
        self._engine = await asyncio.to_thread(RowEngine, options)

    async def answer(self, row: Row) -> dict[str, Any]:
        return await self._engine(row)


@dataclass(eq=False, slots=True)
class RowReplica:
    actor: Any
    num_rows: int = 0  # that it was handed and has not answered
    is_ready: bool = False


class RayEngine:
    """To a job what one engine is: answers any row, by whichever replica has the least to do."""

    def __init__(self, options: RowOptions, room: Room) -> None:
        self._options = options
        make = ray.remote(
            **room.each, max_concurrency=options.num_at_once, scheduling_strategy="SPREAD"
        )
        self._actors: Any = make(RowActor)
        self._replicas: list[RowReplica] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._num_lost = 0  # since the last answer
        self._max_lost = room.num_engines + MAX_LOST
        self._error: Exception | None = None  # why there will be no more answers
        for _ in range(room.num_engines):
            self._add_replica()

    async def __call__(self, row: Row) -> dict[str, Any]:
        while True:
            replica = await self._claim()
            try:
                line: dict[str, Any] = await replica.actor.answer.remote(row)
            except RayTaskError as error:
                if not isinstance(error.cause, EngineError):
                    self._num_lost = 0
                    raise error.cause from None  # not the engine's fault
                await self._lose(replica, error.cause)
            except RayError as error:  # the actor is gone, or its node with an answer
                await self._lose(replica, error)
            else:
                self._num_lost = 0
                return line
            finally:
                replica.num_rows -= 1
                async with self._changed:
                    self._changed.notify()

    def close(self) -> None:
        """End the engines; rows that wait are never answered."""
        for task in self._starting:
            task.cancel()
        for replica in self._replicas:
            ray.kill(replica.actor)

    async def _claim(self) -> RowReplica:
        """Wait for a replica that can take a row, and count the row as its own."""
        async with self._changed:
            while (replica := self._least_busy()) is None:
                await self._changed.wait()
        replica.num_rows += 1
        return replica

    def _least_busy(self) -> RowReplica | None:
        if self._error is not None:
            raise self._error
        ready = [each for each in self._replicas if each.is_ready]
        replica = min(ready, key=lambda each: each.num_rows, default=None)
        is_free = replica is not None and replica.num_rows < self._options.num_at_once
        return replica if is_free else None

    def _add_replica(self) -> None:
        replica = RowReplica(self._actors.remote())
        self._replicas.append(replica)
        task = asyncio.create_task(self._start(replica))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, replica: RowReplica) -> None:
        try:
            await replica.actor.start.remote(self._options)
        except RayTaskError as error:
            if any(each.is_ready for each in self._replicas):
                await self._lose(replica, error.cause)  # it may be its machine
                return
            self._error = error.cause  # another would not start either
        except RayError as error:
            await self._lose(replica, error)
            return
        replica.is_ready = True
        async with self._changed:
            self._changed.notify_all()

    async def _lose(self, replica: RowReplica, reason: Exception) -> None:
        """Put another engine in the place of one that is gone; its rows all tell of that."""
        if replica not in self._replicas:
            return
        self._replicas.remove(replica)
        ray.kill(replica.actor)  # it may live on with a dead engine
        self._num_lost += 1
        logger.warning("an engine is lost, and its rows go to others: %s", reason)
        if self._num_lost <= self._max_lost:
            self._add_replica()
            return
        text = f"{self._num_lost} engines in a row were lost, the last one because of: {reason}"
        self._error = EngineError(text)
        async with self._changed:
            self._changed.notify_all()
