"""Trace the GPU during engine steps: busy time, kernels and gaps.

    python -m benchmarks.engine.trace --batch 1 64 256
    python -m benchmarks.engine.trace --prefill --batch 16 --prompt-len 2048

Traces steady decode steps or, with --prefill, prefill steps. Open the trace of the last batch size
at https://ui.perfetto.dev. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.report.records import check_writable, keep
from benchmarks.runner import add_workload, check_fits, open_llm
from benchmarks.workloads import Workload, uniform
from nanovllm import LLM
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, at_least, dashed
from nanovllm.cli.start import configure_logging
from nanovllm.devices.cuda.memory import has_cuda
from nanovllm.errors import ConfigError

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_SHOWN, NUM_GAPS = 15, 5


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in microseconds, over the whole window."""

    window: float  # from the first activity to the end of the last
    busy: float  # while at least one activity runs
    gaps: dict[str, float]  # keyed by the activity that ended the gap
    kernels: dict[str, list[float]]  # durations, keyed by name


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    if not has_cuda():
        raise ConfigError("the trace needs a GPU, and this machine has no CUDA device")
    check_writable(args.json)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with open_llm(args) as llm:
        for num_seqs in args.batch:
            trace(llm, num_seqs, args)
    return 0


def trace(llm: LLM, num_seqs: int, args: argparse.Namespace) -> None:
    """Time some steps without the profiler, then profile as many; finish all sequences."""
    max_tokens = 1 if args.prefill else 3 * args.steps + 10
    vocab_size = llm.engine.model_config.vocab_size
    workload = uniform(vocab_size, num_seqs, args.prompt_len, max_tokens)
    check_fits(llm, workload)
    run_steps(llm, workload, args)  # warm-up
    bare_ms = statistics.mean(run_steps(llm, workload, args))
    activities = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * args.host
    with profile(activities=activities) as profiler:
        num_steps = len(run_steps(llm, workload, args))
    profiler.export_chrome_trace(args.out)
    while not llm.added.is_finished():
        llm.added.step()
    summary = summarize(json.loads(Path(args.out).read_text())["traceEvents"])
    print(f"batch {num_seqs}, {num_steps} steps of {bare_ms:.3f} ms; trace in {args.out}")
    print(report(summary, num_steps), flush=True)
    idle = 100 * (1 - summary.busy / summary.window)
    busy_ms, window_ms = (us / 1000 / num_steps for us in (summary.busy, summary.window))
    cells = {
        "batch": f"{num_seqs}",
        "ms a step": f"{bare_ms:.3f}",
        "profiled: ms busy": f"{busy_ms:.3f}",
        "ms idle": f"{window_ms - busy_ms:.3f} ({idle:.1f}%)",
    }
    case = f"trace-{'prefill' if args.prefill else 'decode'}-bs{num_seqs}"
    about = {"model": args.model, "device": "cuda", "enforce_eager": args.enforce_eager}
    keep(args.json, case=case, unit="% idle", runs=[idle], floor=None, cells=cells, **about)


def run_steps(llm: LLM, workload: Workload, args: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each step; all of them are prefill, or all are decode."""
    engine = llm.added
    if engine.is_finished():  # otherwise sequences are still decoding since the last call
        add_workload(llm, workload, uuid.uuid4().hex)
        num_left = 0 if args.prefill else workload.num_prompt_tokens
        while num_left > 0:
            num_left -= engine.step().num_prefill_tokens
    times = [time.perf_counter()]
    while not engine.is_finished() if args.prefill else len(times) <= args.steps:
        engine.step()
        times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in pairwise(times)]


def summarize(events: list[dict[str, Any]]) -> Summary:
    """Sum up activities and the gaps between them; overlapping activities count once as busy."""
    activities = [
        event for event in events if event.get("cat") in GPU_CATEGORIES and "dur" in event
    ]
    if not activities:
        raise ConfigError("the profiler saw no GPU activity; is another profiler attached?")
    activities.sort(key=lambda event: event["ts"])
    gaps: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    start = end = activities[0]["ts"]
    for event in activities:
        if event["ts"] > end:
            gaps[event["name"]] += event["ts"] - end
        kernels[event["name"]].append(event["dur"])
        end = max(end, event["ts"] + event["dur"])
    return Summary(end - start, end - start - sum(gaps.values()), dict(gaps), dict(kernels))


def report(summary: Summary, num_steps: int) -> str:
    """Return a table of where the time of a step goes."""
    num_kernels = sum(map(len, summary.kernels.values()))
    rows = [
        (summary.busy, f"{num_kernels / num_steps:.1f} GPU busy"),
        (summary.window - summary.busy, "gaps between activities"),
    ]
    gaps = [(total, f"  before {name}") for name, total in summary.gaps.items()]
    rows += sorted(gaps, reverse=True)[:NUM_GAPS]
    kernels = [
        (sum(times), f"{len(times) / num_steps:.1f} {name}")
        for name, times in summary.kernels.items()
    ]
    rows += sorted(kernels, reverse=True)[:NUM_SHOWN]
    lines = [
        f"{total / num_steps:>10.1f} {total / summary.window:>6.1%}  {name[:90]}"
        for total, name in rows
    ]
    return "\n".join([f"{'us/step':>10} {'share':>6}  calls/step, name", *lines])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, count = parser.add_argument, at_least(1)
    add("--batch", type=count, nargs="+", default=[64], help="prompts (default: 64)")
    add("--prompt-len", type=count, default=128, help="tokens (default: %(default)s)")
    add("--steps", type=count, default=50, help="decode steps to record (default: %(default)s)")
    add("--prefill", action="store_true", help="record prefill steps (default: decode)")
    add(
        "--out",
        default="benchmarks/out/trace.json",
        help="the trace to write (default: %(default)s)",
    )
    add(
        "--host", action="store_true", help="also record torch operators, which slows down the host"
    )
    add("--json", metavar="FILE", help="append each summary as a line of JSON (default: none)")
    add_engine_options(parser, "qwen3-0.6b", load_format="dummy")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
