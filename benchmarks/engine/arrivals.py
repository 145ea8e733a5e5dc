"""Measure token latency while requests arrive at random, starting with a cold engine.

    python -m benchmarks.engine.arrivals [--model qwen3-0.6b] [--rate 200] [--seconds 6]

Starts a fresh `AsyncLLM` with random weights and default options, then sends requests as a Poisson
process in several windows, each with new prompts. Prints percentiles of the time to first token and
of the inter-token latency in each window. Gaps that end after the last arrival are excluded, as
fewer and fewer streams run by then.

The targets on one H200 apply to every window, including the first. Qwen3-0.6B at 200 requests per
second: p99 of 10 ms between tokens and 50 ms to the first token. Qwen3-8B at 40 requests per
second: 25 ms and 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from benchmarks.models import model_path
from benchmarks.report.records import check_writable, keep, versions_text
from benchmarks.workloads import LAST_ID
from nanovllm import AsyncLLM, SamplingParams
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least, dashed
from nanovllm.cli.start import configure_logging

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Waits:
    """Latencies in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Window:
    """Latencies of one window in milliseconds."""

    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    num_requests: int


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    check_writable(args.json)
    start = time.perf_counter()
    llm = AsyncLLM(
        model_path(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        target_inter_token_ms=args.target_inter_token_ms,
    )
    try:
        ready = time.perf_counter() - start
        print(f"{args.model}, {args.rate} requests/s, {args.prompt_len} tokens in and", end=" ")
        print(f"{args.new_tokens} out, ready after {ready:.1f} s, {versions_text()}", flush=True)
        asyncio.run(run_windows(llm, args))
    finally:
        llm.close()
    return 0


async def run_windows(llm: AsyncLLM, args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    last_id = min(LAST_ID, llm.model_config.vocab_size - 1)
    num_requests = round(args.rate * args.seconds)
    for number in range(1, args.windows + 1):
        prompts = [rng.choices(range(last_id), k=args.prompt_len) for _ in range(num_requests)]
        gaps = [rng.expovariate(args.rate) for _ in prompts]
        window = summarize(await serve(llm, prompts, np.cumsum(gaps).tolist(), args.new_tokens))
        print(
            f"window {number}: first token p50 {window.first_p50:.1f} p99 {window.first_p99:.1f},"
            f" inter-token p50 {window.gap_p50:.1f} p99 {window.gap_p99:.1f}"
            f" max {window.gap_max:.1f} ms",
            flush=True,
        )
        about = {"model": args.model, "rate": args.rate, "window": number, **asdict(window)}
        keep(args.json, case="arrivals", unit="ms", runs=[window.gap_p99], floor=None, **about)


async def serve(llm: AsyncLLM, prompts: Prompts, due: list[float], new_tokens: int) -> Waits:
    """Send each prompt when it is due, in seconds from now, and wait for all tokens."""
    params = SamplingParams(temperature=0.6, max_tokens=new_tokens, ignore_eos=True)
    waits, begin = Waits(), time.perf_counter()

    async def one(prompt: list[int], arrival: float) -> None:
        newest: float | None = None
        async for _ in llm.generate(prompt, params):
            now = time.perf_counter() - begin
            if newest is None:
                waits.first.append(now - arrival)
            elif now <= due[-1]:
                waits.gaps.append(now - newest)
            newest = now

    tasks = []
    for prompt, arrival in zip(prompts, due, strict=True):
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - begin)))
        tasks.append(asyncio.create_task(one(prompt, arrival)))
    await asyncio.gather(*tasks)
    return waits


def summarize(waits: Waits) -> Window:
    first = 1000 * np.percentile(waits.first, (50, 99))
    gaps = 1000 * np.percentile(waits.gaps or [0.0], (50, 99, 100))
    return Window(*map(float, (*first, *gaps)), len(waits.first))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="model whose shapes are used (default: %(default)s)")
    add("--rate", type=float, default=200.0, help="requests per second (default: %(default)s)")
    add("--seconds", type=float, default=6.0, help="length of a window (default: %(default)s)")
    add("--windows", type=at_least(1), default=4, help="(default: %(default)s)")
    add("--prompt-len", type=at_least(1), default=512, help="in tokens (default: %(default)s)")
    add("--new-tokens", type=at_least(2), default=128, help="(default: %(default)s)")
    add("--target-inter-token-ms", type=float, default=25.0, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: %(default)s)")
    add("--json", metavar="FILE", help="append each window as a line of JSON (default: none)")
    add("-v", "--verbose", action="store_true", help="log engine activity (default: no)")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
