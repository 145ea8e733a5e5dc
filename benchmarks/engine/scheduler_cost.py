"""Measure the Python cost of scheduling per row and step, with an executor that does nothing.

    python -m benchmarks.engine.scheduler_cost

A step is schedule + submit + commit at depth 1; the target is 3 us per row at 256 and 1,024 rows.
"""

from __future__ import annotations

import statistics
import time
from array import array

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams

NUM_STEPS = 100


class InstantExecutor:
    """An executor that takes no time; every row samples token 5."""

    def start(self) -> ExecutorInfo:
        return ExecutorInfo(0, 1, "none", "none")

    def submit(self, plan: StepPlan) -> InstantExecutor:
        self._num_sampled = int(np.count_nonzero(plan.num_logits))
        return self

    def result(self) -> StepResult:
        return StepResult(np.full(self._num_sampled, 5, np.int32))

    def close(self) -> None:
        pass


def main() -> None:
    for num_rows in (64, 256, 1024):
        print(f"{num_rows:5d} rows: {microseconds_per_row(num_rows):.2f} us per row and step")


def decoding_core(num_rows: int) -> EngineCore:
    """Return a core with long-running decode requests and an instant executor."""
    scheduler = Scheduler(BlockManager(64 * num_rows, 32, True), num_rows, 16384)
    core = EngineCore(scheduler, InstantExecutor(), depth=1, max_model_len=4096)
    params = SamplingParams(max_tokens=2000)
    for seq_id in range(num_rows):
        prompt = array("i", [seq_id + 1] * 16)
        core.add(Request(seq_id, prompt, params, stop_token_ids=frozenset({2})))
    return core


def microseconds_per_row(num_rows: int) -> float:
    """Return the median over rounds of steady decode, including block allocation and hashing."""
    core = decoding_core(num_rows)
    for _ in range(5):
        core.step()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            core.step()
        rounds.append((time.perf_counter() - start) / NUM_STEPS / num_rows)
    return statistics.median(rounds) * 1e6


if __name__ == "__main__":
    main()
