"""Rows of a job, answered by engines on a Ray cluster; those of a lost engine move to another."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nanovllm.batch.batch_engine import RowEngine, RowOptions
from nanovllm.batch.rows import Row
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError

MAX_TRIES = 6  # of a row whose engines are lost; more are no accident

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Where engines go on a cluster."""

    num_engines: int
    each: dict[str, int]  # what Ray sets aside for one, in its own words


def find_room(config: EngineConfig, num_engines: int | None = None) -> Room:
    """Plan as many engines as fit, or as many as are asked for.

    An engine takes a GPU for every rank. Without GPUs it takes the CPUs of the smallest machine, or
    fewer if that many engines are asked for.
    """
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    gpus = [int(each.get("GPU", 0)) for each in resources]
    if config.device != "cpu" and any(gpus):
        each, fitting = {"num_gpus": num_ranks}, sum(count // num_ranks for count in gpus)
        wanted = num_engines or max(fitting, 1)
    else:
        cpus = [int(each["CPU"]) for each in resources if each.get("CPU", 0) >= 1]
        wanted = num_engines or len(cpus)
        num_cpus = max(min([*cpus, sum(cpus) // max(wanted, 1)]), 1)
        each, fitting = {"num_cpus": num_cpus}, sum(count // num_cpus for count in cpus)
    if not 1 <= wanted <= fitting:
        needs = ", ".join(f"{name}={count:g}" for name, count in each.items())
        raise ConfigError(
            f"the Ray cluster has room for {fitting} engines with {needs} each, not for {wanted}"
        )
    return Room(wanted, each)


class RowActor:
    """An engine in a process that Ray starts, and starts again when it dies."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._engine: RowEngine | None = None
        self._starting = asyncio.Lock()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def ready(self) -> None:
        """Wait for an engine that works; Ray calls this again if the process dies meanwhile."""
        await self._working_engine()

    async def answer(self, row: Row) -> dict[str, Any]:
        engine = await self._working_engine()
        return await engine(row)

    async def _working_engine(self) -> RowEngine:
        async with self._starting:
            if self._engine is not None and self._engine.llm.error is not None:
                await asyncio.to_thread(self._engine.close)
                self._engine = None
            if self._engine is None:
                self._engine = await asyncio.to_thread(RowEngine, self._options)
            return self._engine


class RayEngine:
    """To a job what one engine is: answers any row, by whichever engine has the least to do."""

    def __init__(self, options: RowOptions, room: Room) -> None:
        make: Any = ray.remote(
            **room.each,
            max_concurrency=options.num_at_once,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        self.actors = [make(RowActor).remote(options) for _ in range(room.num_engines)]
        # A slot is the number of a row at an engine, and the number of the engine.
        self.free: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()
        self._waiting: dict[asyncio.Task[None], int] = {}  # for engines, by number, to be ready
        self._error: Exception | None = None  # why there will be no more answers
        for number in range(room.num_engines):
            for row in range(options.num_at_once):
                self._free_when_ready((row, number))

    async def __call__(self, row: Row) -> dict[str, Any]:
        for _ in range(MAX_TRIES):
            slot = await self.free.get()
            if self._error is not None:
                self.free.put_nowait(slot)  # for the next one who waits
                raise self._error
            try:
                line: dict[str, Any] = await self.actors[slot[1]].answer.remote(row)
            except RayError as error:  # of the row, or the engine or its process or node is gone
                reason = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(error, RayTaskError) and not isinstance(reason, EngineError):
                    self.free.put_nowait(slot)
                    raise reason from None
                if slot[1] not in self._waiting.values():
                    logger.warning("an engine is lost, and its rows go to others: %s", reason)
                self._free_when_ready(slot)
            else:
                self.free.put_nowait(slot)
                return line
        text = f"{MAX_TRIES} engines were lost with row {row.index}, the last one because of"
        raise EngineError(f"{text}: {reason}")

    def close(self) -> None:
        """End the engines; rows that wait are never answered."""
        for task in self._waiting:
            task.cancel()
        for actor in self.actors:
            ray.kill(actor)

    def _free_when_ready(self, slot: tuple[int, int]) -> None:
        task = asyncio.create_task(self._wait(slot))
        self._waiting[task] = slot[1]
        task.add_done_callback(self._waiting.pop)

    async def _wait(self, slot: tuple[int, int]) -> None:
        try:
            await self.actors[slot[1]].ready.remote()
        except RayError as error:  # it cannot be started
            self._error = error.cause if isinstance(error, RayTaskError) else error
        self.free.put_nowait(slot)
