"""Decoding on all threads against one, on idle cores and beside programs that keep them busy.

    python -m benchmarks.engine.cpu_busy_cores

Where cores are busy, all threads should take at most 1.5 times as long as one. The engines take
turns; the median round of each counts, as others' noise is what this is about.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    most = torch.get_num_threads()
    engines = {}
    for num_threads in (1, most):
        torch.set_num_threads(num_threads)
        engines[num_threads] = LLM(args.model)
    for num_busy in (0, most, 2 * most):
        with busy_programs(num_busy):
            report(num_busy, engines, args.tokens, args.rounds)


def report(num_busy: int, engines: dict[int, LLM], num_tokens: int, num_rounds: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    seconds: dict[int, list[float]] = {num_threads: [] for num_threads in engines}
    for _ in range(num_rounds):
        for num_threads, llm in engines.items():
            torch.set_num_threads(num_threads)
            start = time.perf_counter()
            llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
            seconds[num_threads].append(time.perf_counter() - start)
    one, most = (statistics.median(times) / num_tokens * 1e3 for times in seconds.values())
    print(
        f"{num_busy} busy programs: {one:.1f} ms a token on one thread, {most:.1f} on "
        f"{max(engines)}, which is {most / one:.2f} times as long"
    )


@contextmanager
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


if __name__ == "__main__":
    main()
