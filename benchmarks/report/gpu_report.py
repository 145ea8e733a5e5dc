"""Measure everything that benchmarks/RESULTS.md has from a GPU, the most important first.

    python -m benchmarks.report.gpu_report [--only compare-0.6b,'*-8b']
    python -m benchmarks.report.tables

Each part is a command with a process and a time limit of its own; what it had measured by then is
kept. Numbers are medians of three runs, starts and traces single ones.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch

from benchmarks.report.records import RESULTS, Record, markdown, read_records, shown
from nanovllm.bench.report import check_writable, number
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

COMPARE = "bench.py --load-format dummy --model"
LATENCY = "-m nanovllm bench latency --model"
PARTS = {
    "compare-0.6b": f"{COMPARE} qwen3-0.6b --case mixed bs1 bs8 bs64 bs256 prefill",
    "steps-0.6b": f"{LATENCY} qwen3-0.6b",
    "prefix-0.6b": "-m nanovllm bench prefix --model qwen3-0.6b",
    "trace-0.6b": "-m benchmarks.engine.trace --model qwen3-0.6b --batch 1 64 256",
    "compare-8b": f"{COMPARE} qwen3-8b --case mixed bs1 bs64",
    "steps-8b": f"{LATENCY} qwen3-8b --batch 1 64",
    "steps-30b": f"{LATENCY} qwen3-30b-a3b --batch 1 64",
    "startup-0.6b": "-m benchmarks.engine.startup --model qwen3-0.6b",
    "transformers-0.6b": f"{COMPARE} qwen3-0.6b --engine nanovllm transformers --num-seqs 64 "
    "--max-input-len 512 --max-output-len 512",
}
PART_LIMIT = 200.0  # seconds


def main() -> int:
    args = parse_args()
    parts = select(args.only)
    check_writable(args.json)
    num_before = len(read_records(args.json))
    deadline = time.monotonic() + args.max_seconds
    failures = []
    for name in parts:
        command = [sys.executable, *PARTS[name].split(), *args.options, "--json", args.json]
        print(f"\n[{name}] {' '.join(command[1:])}", flush=True)
        seconds = min(PART_LIMIT, deadline - time.monotonic())
        if why := run_limited(command, seconds) if seconds > 0 else "no time was left":
            failures.append(f"FAILED, whole or in part: {name}: {why}")
    if records := read_records(args.json)[num_before:]:
        print(f"\n{markdown([row(record) for record in records])}")
    print("\n".join(failures))
    return 1 if failures else 0


def select(only: str | None) -> list[str]:
    """The parts whose names match one of some patterns, in their order."""
    patterns = only.split(",") if only else ["*"]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in PARTS):
            raise ConfigError(f"--only {pattern}: there is no such part, only {', '.join(PARTS)}")
    return [name for name in PARTS if any(fnmatch(name, pattern) for pattern in patterns)]


def run_limited(command: list[str], seconds: float) -> str | None:
    """Run a command, with all that it starts, no longer than that; return what went wrong."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"stopped after {seconds:.0f} s"
    return f"exit code {code}" if code else None


def row(record: Record) -> dict[str, str]:
    return {
        "engine": record.get("engine", "nanovllm"),
        "model": record["model"],
        "case": record["case"],
        "value": f"{number(record['value'])} {record['unit']}",
        "floor": shown(record["floor"]),
        "runs": " ".join(map(number, record["runs"])),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "append each result as a line of JSON (default: %(default)s)"
    add("--json", default=RESULTS, metavar="FILE", help=text)
    add("--only", metavar="NAMES", help=f"of {', '.join(PARTS)}; * is any (default: all)")
    text = "for everything: what then runs is stopped (default: %(default)g)"
    add("--max-seconds", type=float, default=900.0, metavar="X", help=text)
    add("options", nargs="*", metavar="OPTION", help="added to each command, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
