"""Measure what a user of `nanovllm generate` waits for: the first token and the gaps after it.

    python -m benchmarks.engine.first_minute [--runs 3] [-- OPTIONS OF nanovllm generate]

Runs the real command with its output in a pipe, first as a warm-up (which compiles and caches the
kernels), and records when the text of each token arrives. The targets: the first token within 6 s
on two cores, and no gap longer than 3 times the median.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.report.records import check_writable, keep, versions_text
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least, dashed

FIRST_BAR, GAP_BAR = 6.0, 3.0  # seconds; multiple of the median gap
PROMPT = "Why is the sky blue?"


@dataclass(frozen=True, slots=True)
class Run:
    first: float  # seconds from the start of the process to its first text
    median_gap: float  # seconds between two arrivals
    longest_gap: float
    total: float

    @property
    def stall(self) -> float:
        """The longest gap, as a multiple of the median gap."""
        return self.longest_gap / self.median_gap

    @property
    def meets_bars(self) -> bool:
        return self.first <= FIRST_BAR and self.stall <= GAP_BAR


def main() -> int:
    args = parse_args()
    check_writable(args.json)
    command = [sys.executable, "-m", "nanovllm", "generate", PROMPT, "--max-tokens", "100"]
    command += args.options
    measure(command)
    runs = []
    for _ in range(args.runs):
        runs.append(run := measure(command))
        print(
            f"first text {run.first:.2f} s, median gap {run.median_gap:.2f} s, longest "
            f"{run.stall:.1f} medians, whole run {run.total:.2f} s",
            flush=True,
        )
        keep(args.json, case="first-minute", unit="s", runs=[run.first], floor=None, **asdict(run))
    median = statistics.median(run.first for run in runs)
    num_met = sum(run.meets_bars for run in runs)
    print(f"first text after {median:.2f} s; {num_met} of {len(runs)} runs meet both bars")
    print(f"{os.cpu_count()} cores, {versions_text()}")
    return 0


def measure(command: list[str]) -> Run:
    """Run the command and record when text arrives."""
    start = time.perf_counter()
    # Keep compiled modules and kernels, as on a user's machine.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        times = []
        while os.read(process.stdout.fileno(), 65536):
            times.append(time.perf_counter() - start)
    if process.returncode:
        raise SystemExit(process.returncode)
    assert len(times) > 10, "too few pieces of text for a measurement"
    # The last piece is the final newline, which is not a token.
    gaps = [after - before for before, after in itertools.pairwise(times)][:-1]
    total = time.perf_counter() - start
    return Run(times[0], statistics.median(gaps), max(gaps), total)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--runs", type=at_least(1), default=3, help="timed runs, after one warm-up run (default: 3)"
    )
    add("--json", metavar="FILE", help="append each run as a line of JSON (default: none)")
    add("options", nargs="*", metavar="OPTION", help="options of nanovllm generate, after --")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
