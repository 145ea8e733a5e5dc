"""Batch jobs on the engines of a Ray cluster; the rows of a lost engine move to another one."""

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

MAX_TRIES = 6  # a row that has run on this many failed engines probably causes the failures

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """The number of engines to start on a cluster, and the resources of each."""

    num_engines: int
    each: dict[str, int]  # Ray resources of one engine, as keyword arguments of ray.remote


def place_engines(config: EngineConfig, num_engines: int | None = None) -> EnginePlacement:
    """Place `num_engines` engines or, by default, as many as fit on the cluster.

    An engine takes one GPU per rank. Without GPUs it takes as many CPUs as the smallest machine
    has, or fewer so that the requested number of engines fits.
    """
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    gpus = [int(each.get("GPU", 0)) for each in resources]
    if config.device != "cpu" and any(gpus):
        each, fitting = {"num_gpus": num_ranks}, sum(count // num_ranks for count in gpus)
        num_engines = num_engines or max(fitting, 1)
    else:
        cpus = [int(each["CPU"]) for each in resources if each.get("CPU", 0) >= 1]
        num_engines = num_engines or len(cpus)
        num_cpus = max(min([*cpus, sum(cpus) // max(num_engines, 1)]), 1)
        each, fitting = {"num_cpus": num_cpus}, sum(count // num_cpus for count in cpus)
    if not 1 <= num_engines <= fitting:
        needs = ", ".join(f"{name}={count:g}" for name, count in each.items())
        raise ConfigError(
            f"{num_engines} engines with {needs} each do not fit on the Ray cluster, which has "
            f"room for {fitting}"
        )
    return EnginePlacement(num_engines, each)


class RowActor:
    """A Ray actor with an engine; Ray restarts its process when it dies."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._engine: RowEngine | None = None
        self._starting = asyncio.Lock()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def ready(self) -> None:
        """Wait for a working engine; Ray calls this again if the process dies before that."""
        await self._working_engine()

    async def process(self, row: Row) -> dict[str, Any]:
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
    """Several engines with the interface of one; rows are spread evenly over them."""

    def __init__(self, options: RowOptions, placement: EnginePlacement) -> None:
        make: Any = ray.remote(
            **placement.each,
            max_concurrency=options.max_concurrency,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        self.actors = [make(RowActor).remote(options) for _ in range(placement.num_engines)]
        # A permit is (index within its engine, engine number); taking the lowest spreads the rows.
        self.free: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()
        self._waiting: dict[asyncio.Task[None], int] = {}  # task -> engine that it waits for
        self._error: Exception | None = None  # set when no more rows can be completed
        for number in range(placement.num_engines):
            for row in range(options.max_concurrency):
                self._free_when_ready((row, number))

    async def __call__(self, row: Row) -> dict[str, Any]:
        for _ in range(MAX_TRIES):
            permit = await self.free.get()
            if self._error is not None:
                self.free.put_nowait(permit)  # the next waiter raises the error too
                raise self._error
            try:
                line: dict[str, Any] = await self.actors[permit[1]].process.remote(row)
            except RayError as error:  # the row failed, or its engine, process or node is lost
                reason = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(error, RayTaskError) and not isinstance(reason, EngineError):
                    self.free.put_nowait(permit)
                    raise reason from None
                if permit[1] not in self._waiting.values():
                    logger.warning("an engine was lost; its rows move to other engines: %s", reason)
                self._free_when_ready(permit)
            else:
                self.free.put_nowait(permit)
                return line
        text = f"{MAX_TRIES} engines were lost while they processed row {row.index}"
        raise EngineError(f"{text}; the last error: {reason}")

    def close(self) -> None:
        """Stop the engines; waiting rows are never completed."""
        for task in self._waiting:
            task.cancel()
        for actor in self.actors:
            ray.kill(actor)

    def _free_when_ready(self, permit: tuple[int, int]) -> None:
        task = asyncio.create_task(self._wait(permit))
        self._waiting[task] = permit[1]
        task.add_done_callback(self._waiting.pop)

    async def _wait(self, permit: tuple[int, int]) -> None:
        try:
            await self.actors[permit[1]].ready.remote()
        except RayError as error:  # the engine cannot be started
            self._error = error.cause if isinstance(error, RayTaskError) else error
        self.free.put_nowait(permit)
