"""Helpers of the kernel benchmarks: timing, checking and printing."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.floors import Rates
from nanovllm.devices.cuda.graph_pool import GraphPool
from nanovllm.devices.cuda.memory import has_cuda
from nanovllm.errors import ConfigError

NUM_REPLAYS = 10
MAX_ERROR = 0.02  # largest relative error (by norm) of a correct result

Run = Callable[[], Tensor]


class GpuTimer:
    """Times calls as a captured graph, so that the device never waits for launches."""

    def __init__(self) -> None:
        if not has_cuda():
            raise ConfigError("these kernels need a GPU, and this machine has no CUDA device")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us", flush=True)
        self._pool = GraphPool(torch.device("cuda"), has_kernels=False)
        # The pool's memory lives as long as any of its graphs; this one keeps it alive.
        self._keeps_pool = self._pool.capture(lambda: torch.zeros(1, device="cuda"))

    def microseconds(self, calls: Sequence[Run], num_replays: int = NUM_REPLAYS) -> float:
        """Return the median time per call; the calls evict each other's data from the cache."""

        def run() -> Tensor:
            for call in calls:
                y = call()
            return y.contiguous()

        replay, _ = self._pool.capture(run)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 2)]
        events[0].record()
        for event in events[1:]:  # queued together; the first replay is a warm-up
            replay()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events[1:])]
        return 1000 * statistics.median(times) / len(calls)

    def measure(self, variants: Mapping[str, Sequence[Run]], expected: Tensor) -> dict[str, float]:
        """Time each variant whose first call is correct; print why the others are skipped."""
        times = {}
        for name, calls in variants.items():
            if why := defect(calls[0], expected):
                print(f"  {name}: {why}", file=sys.stderr)
            else:
                times[name] = self.microseconds(calls)
        return times


def defect(run: Run, expected: Tensor) -> str | None:
    """Return why a variant is skipped (it does not fit the device, or is wrong), or None."""
    from triton import TritonError

    try:
        y = run().float()
    except (TritonError, RuntimeError) as error:  # out of shared memory, or a compiler error
        return f"{type(error).__name__}: {error}".splitlines()[0]
    y = y.reshape(-1, *expected.shape).sum(0)  # add up partial sums, if any
    distance = float((y - expected).norm() / expected.float().norm())
    return None if distance < MAX_ERROR else f"wrong by {distance:.1%}"


def floor(num_bytes: float, num_flops: float) -> float:
    """Return the microseconds that an H200 takes to read or to multiply, whichever is longer."""
    rates = Rates()
    return 1e6 * max(num_bytes / rates.bytes_per_second, num_flops / rates.flops_per_second)


def line(label: str, times: Mapping[str, float], best: float) -> str:
    cells = [f"{name} {took:8.2f}" for name, took in {**times, "floor": best}.items()]
    return "   ".join([label, *cells])


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run in every round; they take turns, as machine load varies."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return times
