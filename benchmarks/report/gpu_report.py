"""Measure everything that benchmarks/RESULTS.md has from a GPU, the most important first.

    python -m benchmarks.report.gpu_report --json benchmarks/out/report.jsonl [--only nano-0.6b]
    python -m benchmarks.report.tables benchmarks/out/report.jsonl

Parts that need the same engine share a process, and no process outlives its limit: what it had
measured by then is kept. Numbers are medians of --repeats passes, starts and traces single ones.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path

from benchmarks.report.records import Record, read_records
from nanovllm.bench import commands
from nanovllm.bench.commands import Bench, open_llm
from nanovllm.bench.options import at_least
from nanovllm.bench.report import append, json_line, number
from nanovllm.cli import build_parser
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError

TRACED = (1, 64, 256)  # sequences
START_LIMIT = 90.0  # seconds for an engine to start, kernels not yet compiled


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    model: str
    command: str  # of `nanovllm bench`, or a script of this folder
    limit: float  # seconds

    @property
    def script(self) -> str:
        return self.command.partition(" ")[0]


SMALL, LARGE, SPARSE = "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"
PARTS = (
    Part("nano-0.6b", SMALL, "throughput", 60),
    Part("bs1-0.6b", SMALL, "latency --batch 1", 20),
    Part("bs64-0.6b", SMALL, "latency --batch 64", 20),
    Part("bs256-0.6b", SMALL, "latency --batch 256", 20),
    Part("bs8-0.6b", SMALL, "latency --batch 8", 20),
    Part("prefill-0.6b", SMALL, "prefill", 20),
    Part("prefix-0.6b", SMALL, "prefix", 20),
    Part("trace-0.6b", SMALL, "trace", 45),  # last: what follows a profiler is slower
    Part("nano-8b", LARGE, "throughput", 100),
    Part("bs1-8b", LARGE, "latency --batch 1", 30),
    Part("bs64-8b", LARGE, "latency --batch 64", 30),
    Part("bs1-30b", SPARSE, "latency --batch 1", 40),
    Part("bs64-30b", SPARSE, "latency --batch 64", 40),
    Part("startup-0.6b", SMALL, "startup", 110),
    Part("compare-0.6b", SMALL, "compare_transformers", 150),
)
SCRIPTS = {"startup": "engine.startup", "compare_transformers": "compare_transformers"}
OWN_PROCESS = tuple(SCRIPTS)
QUICK = {
    "throughput": "--num-seqs 4 --max-len 16",
    "latency": "--prompt-len 16 --new-tokens 4",
    "prefill": "--num-seqs 2 --prompt-len 32",
    "prefix": "--prefix-len 64",
}


def main() -> int:
    args = parse_args()
    parts = [replace(part, model=args.model or part.model) for part in select(PARTS, args.only)]
    append(args.json, "")
    if args.here:
        run_here(parts, args)
        return 0
    num_before = len(read_records(args.json))
    failures = run_processes(parts, args)
    print(f"\n{table(read_records(args.json)[num_before:])}")
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def select(parts: tuple[Part, ...], only: str | None) -> list[Part]:
    """The parts whose names match one of some patterns, in the order of `parts`."""
    patterns = only.split(",") if only else ["*"]
    for pattern in patterns:
        if not any(fnmatch(part.name, pattern) for part in parts):
            names = ", ".join(part.name for part in parts)
            raise ConfigError(f"--only {pattern}: there is no such part, only {names}")
    return [part for part in parts if any(fnmatch(part.name, pattern) for pattern in patterns)]


def run_processes(parts: list[Part], args: argparse.Namespace) -> list[str]:
    """Run each group in a process of its own; return what went wrong."""
    deadline = time.monotonic() + args.max_seconds
    failures = []
    for group in groups(parts):
        names = ", ".join(part.name for part in group)
        seconds = min(START_LIMIT + sum(part.limit for part in group), deadline - time.monotonic())
        began = time.monotonic()
        why = run_limited(command(group, args), seconds) if seconds > 0 else "no time was left"
        print(f"[{names}: {time.monotonic() - began:.0f} s]", flush=True)
        if why:
            failures.append(f"FAILED, whole or in part: {names}: {why}")
    return failures


def groups(parts: list[Part]) -> list[list[Part]]:
    """Neighbours that one engine can serve."""
    found = groupby(parts, lambda part: (part.model, part.script in OWN_PROCESS and part.script))
    return [list(group) for _, group in found]


def command(group: list[Part], args: argparse.Namespace) -> list[str]:
    python = [sys.executable, "-m"]
    if (script := group[0].script) in OWN_PROCESS:
        return [
            *python,
            f"benchmarks.{SCRIPTS[script]}",
            "--model",
            group[0].model,
            "--json",
            args.json,
        ]
    names = ",".join(part.name for part in group)
    own = ["--here", "--only", names, "--json", args.json, "--repeats", str(args.repeats)]
    stand_in = ["--model", args.model] if args.model else []
    return [*python, "benchmarks.report.gpu_report", *own, *stand_in, *["--quick"] * args.quick]


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


def run_here(parts: list[Part], args: argparse.Namespace) -> None:
    """Run parts that share an engine; one that takes too long ends the process."""
    faulthandler.dump_traceback_later(START_LIMIT, exit=True)
    options = bench_options(replace(parts[0], command="latency"), args)
    with open_llm(options, max_num_seqs=512) as llm:
        bench = Bench(llm, options)
        print(bench.setup.heading(), flush=True)
        for part in parts:
            faulthandler.dump_traceback_later(part.limit, exit=True)
            for line in run_part(part, bench, args):
                append(args.json, line)
        faulthandler.cancel_dump_traceback_later()
        if num_preemptions := llm.engine.core.scheduler.num_preemptions:
            print(f"{num_preemptions} preemptions: the KV cache was too small")


def bench_options(part: Part, args: argparse.Namespace) -> argparse.Namespace:
    """What `nanovllm bench` would make of the part's command."""
    words = ["bench", *part.command.split(), "--model", part.model, "--repeats", str(args.repeats)]
    quick = QUICK[part.script].split() if args.quick else []
    return build_parser().parse_args([*words, *quick])


def run_part(part: Part, bench: Bench, args: argparse.Namespace) -> Iterator[str]:
    """Print results as they come, and yield them as lines of JSON."""
    if part.script == "trace":
        yield from traces(bench, num_steps=4 if args.quick else 50)
        return
    benchmark: commands.Benchmark = getattr(commands, part.script)
    for result in benchmark(bench_options(part, args), bench):
        print(result.line(), flush=True)
        yield json_line(bench.setup, result)


def traces(bench: Bench, num_steps: int) -> Iterator[str]:
    from benchmarks.engine import trace  # needs torch

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        for num_seqs in TRACED:
            found = trace.record_trace(bench.llm, num_seqs, 128, num_steps, path)
            print(f"\nbatch {num_seqs}: {trace.heading(found)}:")
            print(trace.report(found.summary, num_steps), flush=True)
            yield trace.trace_line(bench.setup, found)


def table(records: list[Record]) -> str:
    lines = ["| model | case | | | floor | runs |", "|---|---|---|---|---|---|"]
    for record in records:
        value, runs = number(record["value"]), " ".join(map(number, record["runs"]))
        floor = "" if record["floor"] is None else number(record["floor"])
        cells = record["model"], record["case"], value, record["unit"], floor, runs
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default = "benchmarks/out/report.jsonl"
    text = "append each result as a line of JSON (default: %(default)s)"
    add("--json", default=default, metavar="FILE", help=text)
    names = ", ".join(part.name for part in PARTS)
    add("--only", metavar="NAMES", help=f"of {names}; with commas, * for any (default: all)")
    text = "timed passes after a warm-up; their median counts (default: %(default)s)"
    add("--repeats", type=at_least(1), default=3, metavar="N", help=text)
    text = "for everything: what then runs is stopped (default: %(default)g)"
    add("--max-seconds", type=float, default=480.0, metavar="X", help=text)
    add("--model", metavar="NAME", help="stands in for every part's model, to try the report")
    add("--quick", action="store_true", help="a few tokens each, to try the report")
    add("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
