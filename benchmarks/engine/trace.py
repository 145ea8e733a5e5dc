"""What the GPU does in a steady decode step: how long it is busy, with what, and when it waits.

    python -m benchmarks.engine.trace --batch 64 --out trace.json

Open the trace at https://ui.perfetto.dev. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm.bench.commands import open_llm
from nanovllm.bench.options import add_engine_options, at_least
from nanovllm.bench.report import Setup, append, installed
from nanovllm.bench.runner import add_workload, check_fits
from nanovllm.bench.workloads import uniform
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from nanovllm.cli.start import configure_logging
from nanovllm.engine.step import StepPlan
from nanovllm.errors import ConfigError
from nanovllm.worker.runner import PendingStep

if TYPE_CHECKING:
    from nanovllm.llm import LLM

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_WARM_UP = 20
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
class Trace:
    """A window of steady decode steps."""

    num_seqs: int
    num_steps: int
    step_ms: float  # without the profiler
    between_ms: float | None  # from a step's end to the next one's graph, without the profiler
    profiled_ms: float
    summary: Summary


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    if not torch.cuda.is_available():
        raise ConfigError("the trace is of a GPU, and this machine has no CUDA device")
    if args.json:
        append(args.json, "")
    with open_llm(args) as llm:
        info = llm.engine.info
        trace = record_trace(llm, args.batch, args.prompt_len, args.steps, args.out, args.host)
    print(f"batch {args.batch}, {args.steps} steps: {heading(trace)}; trace in {args.out}")
    print(report(trace.summary, args.steps))
    if args.json:
        setup = Setup(args.model, info.device, info.dtype, None, args.enforce_eager)
        append(args.json, trace_line(setup, trace))
    return 0


def record_trace(
    llm: LLM, num_seqs: int, prompt_len: int, num_steps: int, path: str, has_host: bool = False
) -> Trace:
    """Time steady steps, then record as many to a file; the engine is left without sequences."""
    vocab_size = llm.engine.model_config.vocab_size
    workload = uniform(vocab_size, num_seqs, prompt_len, 3 * num_steps + NUM_WARM_UP + 10)
    check_fits(llm, workload)
    add_workload(llm, workload, uuid.uuid4().hex)
    start_decoding(llm, workload.num_prompt_tokens)
    bare = time_steps(llm, num_steps)
    between = time_between_steps(llm, num_steps) if not llm.engine.config.enforce_eager else None
    activities = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * has_host
    with profile(activities=activities) as profiler:
        profiled = time_steps(llm, num_steps)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    while not llm.engine.is_finished():
        llm.engine.step()
    return Trace(num_seqs, num_steps, bare, between, profiled, summarise(read_activities(path)))


def heading(trace: Trace) -> str:
    times = f"{trace.step_ms:.3f} ms a step, {trace.profiled_ms:.3f} under the profiler"
    if trace.between_ms is None:
        return times
    return f"{times}, {1000 * trace.between_ms:.1f} us between steps without it"


def trace_line(setup: Setup, trace: Trace) -> str:
    """A line of JSON like the other benchmarks': the share of time in which the GPU waits."""
    summary = trace.summary
    share = 100 * (1 - summary.busy / summary.window)
    totals = {name: sum(times) for name, times in summary.kernels.items()}
    record = {
        "case": f"trace-bs{trace.num_seqs}",
        "unit": "% idle",
        "runs": [share],
        "floor": None,
        "value": share,
        "step_ms": trace.step_ms,
        "between_ms": trace.between_ms,
        "profiled_ms": trace.profiled_ms,
        "window_us": summary.window / trace.num_steps,
        "busy_us": summary.busy / trace.num_steps,
        "gaps_us": _per_step(_largest(summary.gaps, NUM_GAPS), trace.num_steps),
        "kernels_us": _per_step(_largest(totals, NUM_SHOWN), trace.num_steps),
        "advances_us": _per_step(_largest(summary.advances, NUM_SHOWN), trace.num_steps),
        **asdict(setup),
        "versions": installed(),
    }
    return json.dumps(record) + "\n"


def start_decoding(llm: LLM, num_prompt_tokens: int) -> None:
    """Step until every prompt has its first token, and some more."""
    while num_prompt_tokens > 0:
        num_prompt_tokens -= llm.engine.step().num_prefill_tokens
    for _ in range(NUM_WARM_UP):
        llm.engine.step()


def time_steps(llm: LLM, num_steps: int) -> float:
    start = time.perf_counter()
    for _ in range(num_steps):
        llm.engine.step()
    return 1000 * (time.perf_counter() - start) / num_steps


def time_between_steps(llm: LLM, num_steps: int) -> float:
    """Return the mean milliseconds that the device waits for the next step, by its own events.

    The first is recorded right before the graph: recorded earlier, an idle device would reach it
    before the host has queued the work.
    """
    executor: Any = llm.engine.core.executor
    runner = executor._worker.runner
    graphs, run, begins, ends = runner.forward._graphs, runner.run, [], []

    def record(events: list[torch.cuda.Event]) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    def run_model(replay: Callable[[], None]) -> None:
        record(begins)
        replay()

    def run_step(plan: StepPlan) -> PendingStep:
        pending: PendingStep = run(plan)
        record(ends)
        return pending

    untimed = dict(graphs)
    for size, graph in untimed.items():
        graphs[size] = replace(graph, run_model=partial(run_model, graph.run_model))
    runner.run = run_step
    try:
        time_steps(llm, num_steps)
    finally:
        del runner.run
        graphs.update(untimed)
    torch.cuda.synchronize()
    return statistics.mean(
        end.elapsed_time(begin) for end, begin in zip(ends, begins[1:], strict=False)
    )


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
    busy = window - sum(gaps.values())
    return Summary(window, busy, dict(gaps), dict(kernels), dict(advances))


def report(summary: Summary, num_steps: int) -> str:
    """A table of what takes the time of one step, as shares of the step."""
    num_kernels = sum(map(len, summary.kernels.values()))
    gap = summary.window - summary.busy
    lines = [
        f"{'us/step':>10} {'share':>6} {'calls/step':>10}",
        _line(summary.busy, summary, num_steps, num_kernels, "GPU busy"),
        _line(gap, summary, num_steps, None, "gaps between activities"),
    ]
    for name, total in _largest(summary.gaps, NUM_GAPS):
        lines.append(_line(total, summary, num_steps, None, f"  before {name}"))
    totals = {name: sum(times) for name, times in summary.kernels.items()}
    for title, times in (("time", totals), ("how much later they end", summary.advances)):
        lines.append(f"activities by {title}:")
        for name, total in _largest(times, NUM_SHOWN):
            lines.append(_line(total, summary, num_steps, len(summary.kernels[name]), name))
    return "\n".join(lines)


def _largest(totals: dict[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(totals.items(), key=lambda item: -item[1])[:count]


def _per_step(totals: list[tuple[str, float]], num_steps: int) -> dict[str, float]:
    return {name: round(total / num_steps, 3) for name, total in totals}


def _line(total: float, summary: Summary, num_steps: int, calls: int | None, name: str) -> str:
    count = "" if calls is None else f"{calls / num_steps:.1f}"
    share = total / summary.window
    return f"{total / num_steps:>10.1f} {share:>6.1%} {count:>10}  {name[:90]}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--batch", type=at_least(1), default=64, help="prompts (default: %(default)s)")
    add("--prompt-len", type=at_least(1), default=128, help="tokens (default: %(default)s)")
    add("--steps", type=at_least(1), default=50, help="to record (default: %(default)s)")
    add("--out", default="trace.json", help="the trace to write (default: %(default)s)")
    add("--host", action="store_true", help="record torch's operators too, which slows the host")
    add("--json", metavar="FILE", help="append the summary as a line of JSON (default: none)")
    add_engine_options(parser)
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
