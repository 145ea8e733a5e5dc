"""What the GPU does in a step: how long it is busy, with what, and when it waits.

    python -m benchmarks.engine.trace --batch 1 64 256
    python -m benchmarks.engine.trace --prefill --batch 16 --prompt-len 2048

Steady decode steps or, with --prefill, those that read prompts. Open the trace, of the last batch,
at https://ui.perfetto.dev. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM
from nanovllm.bench.report import check_writable, keep
from nanovllm.bench.runner import add_workload, check_fits
from nanovllm.bench.workloads import Workload, uniform
from nanovllm.cli.bench import open_llm
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, at_least, dashed
from nanovllm.cli.start import configure_logging
from nanovllm.errors import ConfigError
from nanovllm.platforms.cuda import has_cuda

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_SHOWN, NUM_GAPS = 15, 5


@dataclass(frozen=True, slots=True)
class Activity:
    """Something the GPU did; times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in microseconds, over the whole window."""

    window: float  # from the first activity to the end of the last
    busy: float  # at least one activity runs
    gaps: dict[str, float]  # by the activity that ended them
    kernels: dict[str, list[float]]  # durations by name
    advances: dict[str, float]  # by name, how much later they ended than what began before them


@dataclass(frozen=True, slots=True)
class Steps:
    count: int
    ms: float  # each, on average


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    if not has_cuda():
        raise ConfigError("the trace is of a GPU, and this machine has no CUDA device")
    check_writable(args.json)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with open_llm(args) as llm:
        for num_seqs in args.batch:
            trace(llm, num_seqs, args)
    return 0


def trace(llm: LLM, num_seqs: int, args: argparse.Namespace) -> None:
    """Time some steps, then record as many; the engine is left without sequences."""
    max_tokens = 1 if args.prefill else 3 * args.steps + 10
    vocab_size = llm.engine.model_config.vocab_size
    workload = uniform(vocab_size, num_seqs, args.prompt_len, max_tokens)
    check_fits(llm, workload)
    for _ in range(2):  # once to warm up
        begin(llm, workload, args.prefill)
        bare = run_steps(llm, args)
    begin(llm, workload, args.prefill)
    activities = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * args.host
    with profile(activities=activities) as profiler:
        profiled = run_steps(llm, args)
    profiler.export_chrome_trace(args.out)
    while not llm.engine.is_finished():
        llm.engine.step()
    summary = summarise(read_activities(args.out))
    print(f"batch {num_seqs}, {bare.count} steps: {bare.ms:.3f} ms each, {profiled.ms:.3f} under")
    print(f"the profiler; trace in {args.out}\n{report(summary, profiled.count)}", flush=True)
    idle = 100 * (1 - summary.busy / summary.window)
    busy_ms, window_ms = (us / 1000 / profiled.count for us in (summary.busy, summary.window))
    cells = {
        "batch": f"{num_seqs}",
        "ms a step": f"{bare.ms:.3f}",
        "profiled: ms busy": f"{busy_ms:.3f}",
        "ms idle": f"{window_ms - busy_ms:.3f} ({idle:.1f}%)",
    }
    case = f"trace-{'prefill' if args.prefill else 'decode'}-bs{num_seqs}"
    about = {"model": args.model, "device": "cuda", "enforce_eager": args.enforce_eager}
    keep(args.json, case=case, unit="% idle", runs=[idle], floor=None, cells=cells, **about)


def begin(llm: LLM, workload: Workload, is_prefill: bool) -> None:
    """Let prompts wait, or all of them decode, as they do after an earlier call."""
    if not llm.engine.is_finished():
        return
    add_workload(llm, workload, uuid.uuid4().hex)
    num_left = 0 if is_prefill else workload.num_prompt_tokens
    while num_left > 0:
        num_left -= llm.engine.step().num_prefill_tokens


def run_steps(llm: LLM, args: argparse.Namespace) -> Steps:
    start, count = time.perf_counter(), 0
    while not llm.engine.is_finished() if args.prefill else count < args.steps:
        llm.engine.step()
        count += 1
    return Steps(count, 1000 * (time.perf_counter() - start) / count)


def read_activities(path: str) -> list[Activity]:
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return [
        Activity(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES
    ]


def summarise(activities: Iterable[Activity]) -> Summary:
    """Add up what ran and the gaps between; activities that overlap count once as busy."""
    ordered = sorted(activities, key=lambda activity: activity.start)
    if not ordered:
        raise ConfigError("the profiler saw no GPU activity; is another profiler attached?")
    gaps: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    advances: dict[str, float] = defaultdict(float)
    end = ordered[0].start
    for activity in ordered:
        if activity.start > end:
            gaps[activity.name] += activity.start - end
        kernels[activity.name].append(activity.end - activity.start)
        advances[activity.name] += max(activity.end - end, 0.0)
        end = max(end, activity.end)
    window = end - ordered[0].start
    return Summary(window, window - sum(gaps.values()), dict(gaps), dict(kernels), dict(advances))


def report(summary: Summary, num_steps: int) -> str:
    """A table of what takes the time of one step, as shares of the step."""

    def line(total: float, name: str, num_calls: int | None = None) -> str:
        calls = "" if num_calls is None else f"{num_calls / num_steps:.1f}"
        share = total / summary.window
        return f"{total / num_steps:>10.1f} {share:>6.1%} {calls:>10}  {name[:90]}"

    def largest(totals: dict[str, float], count: int) -> list[tuple[str, float]]:
        return sorted(totals.items(), key=lambda item: -item[1])[:count]

    counts = {name: len(times) for name, times in summary.kernels.items()}
    lines = [
        f"{'us/step':>10} {'share':>6} {'calls/step':>10}",
        line(summary.busy, "GPU busy", sum(counts.values())),
        line(summary.window - summary.busy, "gaps between activities"),
        *(line(total, f"  before {name}") for name, total in largest(summary.gaps, NUM_GAPS)),
    ]
    totals = {name: sum(times) for name, times in summary.kernels.items()}
    for title, times in (("time", totals), ("how much later they end", summary.advances)):
        lines.append(f"activities by {title}:")
        lines += [line(total, name, counts[name]) for name, total in largest(times, NUM_SHOWN)]
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, count = parser.add_argument, at_least(1)
    add("--batch", type=count, nargs="+", default=[64], help="prompts (default: 64)")
    add("--prompt-len", type=count, default=128, help="tokens (default: %(default)s)")
    add("--steps", type=count, default=50, help="of decoding to record (default: %(default)s)")
    add("--prefill", action="store_true", help="record how prompts are read (default: decoding)")
    add(
        "--out",
        default="benchmarks/out/trace.json",
        help="the trace to write (default: %(default)s)",
    )
    add("--host", action="store_true", help="record torch's operators too, which slows the host")
    add("--json", metavar="FILE", help="append each summary as a line of JSON (default: none)")
    add_engine_options(parser, "qwen3-0.6b", load_format="dummy")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
