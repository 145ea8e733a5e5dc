"""Compare the defaults of the CPU engine with their alternatives; engines take turns in one run.

    python -m benchmarks.engine.cpu_choices dtype     # bfloat16 or float32
    python -m benchmarks.engine.cpu_choices depth     # 1: asynchronous scheduling, or 0
    python -m benchmarks.engine.cpu_choices threads   # one or all, on idle and busy cores

dtype="auto" keeps a checkpoint in bfloat16 if decode becomes faster and prefill at most 10% slower.
On busy cores, all threads should take at most 1.5 times as long as one. Reports medians over the
rounds of wall-clock time and of CPU time, which is more reliable on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.kernels.timing import take_turns
from benchmarks.workloads import Workload, mixed, uniform
from nanovllm import LLM, SamplingParams
from nanovllm.cli.options import at_least

NUM_IDS = 10_000  # prompts are drawn from these token ids
CLOCKS = {"clock": time.perf_counter, "cores": time.process_time}


def main() -> None:
    args = parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.model}")
    if args.choice == "threads":
        compare_threads(args)
        return
    engines = {
        value: LLM(args.model, **{args.choice: value}, enable_prefix_caching=False)
        for value in {"dtype": ("float32", "bfloat16"), "depth": (0, 1)}[args.choice]
    }
    for name, workload in {
        "a prompt of 1,000 tokens": uniform(NUM_IDS, 1, 1000, 1),
        "64 tokens at batch 1": uniform(NUM_IDS, 1, 8, 64),
        "16 requests of 16 to 128 tokens": mixed(NUM_IDS, 16, 128, 128, min_len=16),
    }.items():
        runs = {f"{args.choice} {value}": runner(llm, workload) for value, llm in engines.items()}
        report(name, runs, args.rounds)


def compare_threads(args: argparse.Namespace) -> None:
    most = torch.get_num_threads()
    workload = uniform(NUM_IDS, 1, 4, 100)
    runs = {}
    for num_threads in (1, most):
        torch.set_num_threads(num_threads)
        runs[f"{num_threads} threads"] = runner(LLM(args.model), workload, num_threads)
    for num_busy in (0, most, 2 * most):
        with busy_programs(num_busy):
            report(f"100 tokens beside {num_busy} busy programs", runs, args.rounds)


def runner(llm: LLM, workload: Workload, num_threads: int | None = None) -> Callable[[], None]:
    options = {"temperature": 0.0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=count, **options) for count in workload.max_tokens]

    def run() -> None:
        torch.set_num_threads(num_threads or torch.get_num_threads())
        llm.generate(workload.prompts, params, use_tqdm=False)

    return run


def report(name: str, runs: dict[str, Callable[[], None]], num_rounds: int) -> None:
    for clock, read in CLOCKS.items():
        rounds = take_turns(runs, num_rounds + 1, read)  # the first round is a warm-up
        times = {each: 1000 * statistics.median(rounds[each][1:]) for each in runs}
        shown = ", ".join(f"{each} {took:.0f} ms" for each, took in times.items())
        first, second = times.values()
        print(f"{name}, by the {clock}: {shown}; ratio {second / first:.2f}", flush=True)


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    programs = [multiprocessing.get_context("spawn").Process(target=spin) for _ in range(count)]
    for program in programs:
        program.start()
    time.sleep(2 if programs else 0)
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.join()


def spin() -> None:
    while True:
        pass


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("choice", choices=["dtype", "depth", "threads"])
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="default: 5")
    return parser.parse_args()


if __name__ == "__main__":
    main()
