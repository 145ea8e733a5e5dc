"""Measure the cost of broadcasting step plans to tensor-parallel workers, without a model.

    python -m benchmarks.engine.plan_broadcast [--ranks N]

"returns" is the duration of submit(); "arrives" is the time from its call until the last worker has
unpickled the plan. The target for 256 decode rows is 0.2 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engine.clock_worker import build_clock
from nanovllm.config import EngineConfig
from nanovllm.engine.step import BlockUpdate, NewRow, StepPlan
from nanovllm.parallel.multiproc_executor import MultiprocExecutor
from nanovllm.sampling_params import SamplingParams

NUM_STEPS = 500


@dataclass(frozen=True, slots=True)
class Timing:
    returns: float  # both are medians, in seconds
    arrives: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    executor = start_clocks(parser.parse_args().ranks)
    plans = {
        "256 decode rows": (decode_rows(256), NUM_STEPS),
        "64 prompts of 30,000 tokens": (long_prompts(64, 30_000), 20),
    }
    for name, (plan, num_steps) in plans.items():
        timing = measure(executor, plan, num_steps)
        returns, arrives = timing.returns * 1e3, timing.arrives * 1e3
        print(f"{name:<29}returns {returns:.3f} ms, arrives {arrives:.3f} ms")
    executor.close()


def start_clocks(num_ranks: int) -> MultiprocExecutor:
    config = EngineConfig("none", tensor_parallel_size=num_ranks, device="cpu")
    nothing: Any = None  # no model is built
    executor = MultiprocExecutor(config, nothing, nothing, build_clock)
    executor.start()
    return executor


def measure(executor: MultiprocExecutor, plan: StepPlan, num_steps: int = NUM_STEPS) -> Timing:
    starts, returns = [], []
    for _ in range(num_steps):
        starts.append(time.monotonic_ns())
        pending = executor.submit(plan)
        returns.append(time.monotonic_ns() - starts[-1])
        pending.result()
    arrivals = executor.submit(decode_rows(0)).result().tokens.view(np.int64).tolist()
    arrives = [arrival - start for arrival, start in zip(arrivals, starts, strict=True)]
    return Timing(statistics.median(returns) / 1e9, statistics.median(arrives) / 1e9)


def decode_rows(num_rows: int) -> StepPlan:
    """Return a steady decode step, in which one row in 64 gets a new block."""
    column = np.ones(num_rows, np.int32)
    return StepPlan(
        slots=np.arange(num_rows, dtype=np.int32),
        starts=1000 * column,
        counts=column,
        num_logits=column,
        new_rows=[],
        block_updates=[BlockUpdate(slot, 15, slot, 0) for slot in range(0, num_rows, 64)],
        released=[],
        num_decode_tokens=num_rows,
    )


def long_prompts(num_rows: int, num_tokens: int) -> StepPlan:
    """Return a step that admits prompts of many tokens."""
    column = np.ones(num_rows, np.int32)
    token_ids = np.arange(num_tokens, dtype=np.int32)
    blocks = list(range(-(-num_tokens // 64)))
    params = SamplingParams(max_tokens=10)
    return StepPlan(
        slots=np.arange(num_rows, dtype=np.int32),
        starts=0 * column,
        counts=column,
        num_logits=0 * column,
        new_rows=[
            NewRow(slot, token_ids + slot, [blocks], num_tokens, params, slot, frozenset({2}))
            for slot in range(num_rows)
        ],
        block_updates=[],
        released=[],
        num_decode_tokens=0,
    )


if __name__ == "__main__":
    main()
