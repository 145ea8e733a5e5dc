"""Measure the Python cost of scheduling per row and step, with an executor that does nothing.

    python -m benchmarks.engine.scheduler_cost [--against ANOTHER_CHECKOUT]

A step is schedule + submit + commit at depth 1; the target is 3 us per row at 256 and 1,024 rows.
The last lines are the cost of a step while 2,000 equal prompts wait.

Separate runs differ by 5%. `--against` compares two checkouts within 1%: two processes take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.executor import ExecutorInfo, StateCounts
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import StepPlan, StepResult
from nanovllm.features.states.state_pool import StatePool
from nanovllm.sampling_params import SamplingParams

NUM_ROUNDS, NUM_STEPS, NUM_TURNS = 15, 100, 150
STATES = StateCounts(num_slots=8, num_snapshots=20)


@dataclass(frozen=True, slots=True)
class InstantResult:
    num_sampled: int

    def result(self) -> StepResult:
        return StepResult(np.full(self.num_sampled, 5, np.int32))


class InstantExecutor:
    """An executor that takes no time; every row samples token 5."""

    def start(self) -> ExecutorInfo:
        return ExecutorInfo(0, 1, "none", "none")

    def submit(self, plan: StepPlan) -> InstantResult:
        return InstantResult(int(np.count_nonzero(plan.num_logits)))

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="a checkout to compare with")
    options = parser.parse_args()
    if options.against is None:
        report()
    else:
        compare(Path.cwd(), options.against)


def report() -> None:
    for num_rows in (1, 8, 64, 256, 1024):
        print(f"{num_rows:5d} rows: {microseconds_per_row(num_rows):.2f} us per row and step")
    for name, states in (("dense", None), ("hybrid", STATES)):
        milliseconds = seconds_per_step(waiting_core(2000, states)) * 1e3
        print(f"8 rows, 2,000 equal prompts wait, {name}: {milliseconds:.3f} ms per step")


def make_core(num_rows: int, states: StateCounts | None = None) -> EngineCore:
    """Return a core with an instant executor."""
    blocks = BlockManager(64 * num_rows, 32, True)
    features = [] if states is None else [StatePool(states, blocks)]
    scheduler = Scheduler(blocks, num_rows, 16384, features)
    return EngineCore(scheduler, InstantExecutor(), depth=1, max_model_len=4096)


def add(core: EngineCore, seq_id: int, prompt: array[int]) -> None:
    params, stops = SamplingParams(max_tokens=2000), frozenset({2})
    core.add(Request(seq_id, prompt, params, stop_token_ids=stops, request_id="many"))


def decoding_core(num_rows: int) -> EngineCore:
    """Return a core with long-running decode requests."""
    core = make_core(num_rows)
    for seq_id in range(num_rows):
        add(core, seq_id, array("i", [seq_id + 1] * 16))
    return core


def waiting_core(num_waiting: int, states: StateCounts | None) -> EngineCore:
    """Return a core whose slots are taken while equal prompts wait."""
    core = make_core(STATES.num_slots, states)
    for seq_id in range(STATES.num_slots):
        add(core, seq_id, array("i", [seq_id + 1] * 16))
    core.step()
    for seq_id in range(num_waiting):
        add(core, STATES.num_slots + seq_id, array("i", range(100)))
    return core


def microseconds_per_row(num_rows: int) -> float:
    return seconds_per_step(decoding_core(num_rows)) / num_rows * 1e6


def compare(mine: Path, other: Path) -> None:
    """Print how much longer a step takes in one checkout, from the ratios of paired turns."""
    # The other checkout runs this file, too, with its own package.
    code = f"import runpy; runpy.run_path({__file__!r})['take_turns']()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(path.resolve())},
            cwd=path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in (mine, other)
    ]
    ratios = []
    for turn in range(NUM_TURNS + 1):
        seconds = [0.0, 0.0]
        for i in (turn % 2, 1 - turn % 2):
            stdin, stdout = processes[i].stdin, processes[i].stdout
            assert stdin is not None
            assert stdout is not None
            print(file=stdin, flush=True)
            seconds[i] = float(stdout.readline())
        ratios.append(seconds[0] / seconds[1])
    for process in processes:
        process.communicate()
    ratio = statistics.median(ratios[1:])  # the first turn also starts the processes
    print(f"256 rows: {ratio:.3f} times as long as in {other}")


def take_turns() -> None:
    """For each line of input, print the CPU seconds of steps that take one block per row."""
    core, num_steps = decoding_core(256), 0
    for _ in sys.stdin:
        if num_steps % 1600 == 0:  # before the sequences end
            core = decoding_core(256)
            for _ in range(20):
                core.step()
        start = time.process_time()
        for _ in range(32):
            core.step()
        print(time.process_time() - start, flush=True)
        num_steps += 32


def seconds_per_step(core: EngineCore) -> float:
    """Return the least CPU time of several rounds; this includes block allocation and hashing."""
    for _ in range(5):
        core.step()
    rounds = []
    for _ in range(NUM_ROUNDS):
        start = time.process_time()
        for _ in range(NUM_STEPS):
            core.step()
        rounds.append((time.process_time() - start) / NUM_STEPS)
    return min(rounds)


if __name__ == "__main__":
    main()
