"""Tensor-parallel workers on the nodes of a Ray cluster: their results and their failures."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.errors import ConfigError, EngineError, WorkerError
from nanovllm.parallel.multiproc_executor import MultiprocExecutor
from tests.parallel.leftovers import descendants, wait_until
from tests.parallel.workers import Order, make_executor, meeting, orders
from tests.test_tensor_parallel import CROWDED, OPTIONS, checkpoint, generate, one_worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster", "one_thread")]

SECONDS = 60.0  # deadline for reports of failures, even on a busy machine
NOBODY = 5  # a rank that does not exist
RAY = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "device": "cpu"}


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    import ray

    from nanovllm.parallel.ray_workers import start_actors

    executor = make_executor(meeting, start_workers=start_actors, step_timeout=5.0)
    executor.start()
    yield executor
    executor.close()
    # The resources are free for the next engine immediately.
    wait_until(lambda: ray.available_resources().get("CPU") == 3, 60.0, lambda: "places are kept")


def test_two_nodes_equal_one_worker(checkpoint_root: Path) -> None:
    path = checkpoint(checkpoint_root, "qwen3-tied").path
    assert generate(path, **RAY, **CROWDED) == one_worker(checkpoint_root, "qwen3-tied")


def test_an_engine_in_its_own_process(checkpoint_root: Path) -> None:
    """It joins the cluster named in the environment, and reports why it ended."""
    path = checkpoint(checkpoint_root, "qwen3-tied").path
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)

    async def run() -> tuple[list[int], list[int], Exception, float]:
        async with AsyncLLM(path, **RAY, **OPTIONS) as llm:
            first = [p.output async for p in llm.generate([1, 2, 3], params)][-1]
            killed_at = None
            while True:  # until the failure is detected; requests may finish before that
                tokens: list[int] = []
                try:
                    async for piece in llm.generate([1, 2, 3], params):
                        tokens += piece.token_ids
                        if killed_at is None:
                            kill_one()
                            killed_at = time.monotonic()
                except EngineError as error:
                    assert killed_at is not None
                    seconds = time.monotonic() - killed_at
                    return list(first.token_ids), tokens, error, seconds

    whole, tokens, error, seconds = asyncio.run(run())
    assert len(whole) == 80
    assert tokens == whole[: len(tokens)]
    assert isinstance(error, WorkerError)
    assert re.match("worker [01] of 2 is lost: ", str(error))
    assert seconds < SECONDS


def kill_one() -> None:
    """Kill a worker of the only engine on the cluster; its processes are our descendants."""
    names = {pid: Path("/proc", pid, "cmdline").read_bytes() for pid in descendants(os.getpid())}
    os.kill(next(int(pid) for pid in names if b"ray::RankActor" in names[pid]), signal.SIGKILL)


def test_answers_come_in_order_until_a_worker_raises(executor: MultiprocExecutor) -> None:
    pending = [executor.submit(orders(7, 7, number)) for number in range(50)]
    assert [each.result().tokens[2] for each in pending] == list(range(50))
    assert executor.submit(orders(Order.MEET, NOBODY)).result().tokens[-2] == 1  # threads
    executor.submit(orders(Order.RAISE, 1))
    reason = "worker 1 of 2 failed:(.|\n)*rank 1 was told to raise"
    with pytest.raises(WorkerError, match=reason):  # although nothing waits for a step
        wait_for_failure(executor)
    with pytest.raises(WorkerError, match=reason):
        executor.submit(orders(7))


def test_a_hang_is_noticed(executor: MultiprocExecutor) -> None:
    executor.submit(orders(Order.MEET, NOBODY)).result()  # the first step may take longer
    pending = executor.submit(orders(Order.MEET, 1))
    with pytest.raises(WorkerError, match=r"worker [01] of 2 did not return from a step for \d+ s"):
        pending.result()


def wait_for_failure(executor: MultiprocExecutor) -> None:
    """Wait until the failure is detected, although nothing waits for a step."""
    wait_until(
        lambda: executor.supervisor.failure is not None, SECONDS, lambda: "no fault was noticed"
    )
    executor.supervisor.raise_if_failed()


def test_a_cluster_that_is_too_small(checkpoint_root: Path) -> None:
    path = checkpoint(checkpoint_root, "qwen3-tied").path
    with pytest.raises(ConfigError, match="needs as many CPUs, but the Ray cluster has only 3"):
        generate(path, **{**RAY, "tensor_parallel_size": 4})
