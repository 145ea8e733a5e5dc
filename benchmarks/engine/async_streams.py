"""Measure the cost of running the core in another process: `AsyncLLM` compared to `LLM`.

    python -m benchmarks.engine.async_streams [--model smollm2] [--streams 64] [--rounds 3]

Both engines are loaded at the same time and take turns, so that other load on the machine slows
them equally. The target is 95% of the throughput of `LLM` on a CPU, and 90% on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from benchmarks.models import model_path
from nanovllm import LLM, AsyncLLM, SamplingParams


def main() -> None:
    args = parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": args.streams}
    if args.dummy:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(64)] for _ in range(args.streams)]
    params = SamplingParams(temperature=0.6, max_tokens=args.max_tokens, ignore_eos=True)
    with LLM(model_path(args.model), gpu_memory_utilization=0.4, **options) as local:
        remote = AsyncLLM(model_path(args.model), gpu_memory_utilization=0.4, **options)
        try:
            rates = [
                (
                    rate(lambda: local.generate(prompts, params, use_tqdm=False), args),
                    rate(lambda: asyncio.run(stream_all(remote, prompts, params)), args),
                )
                for _ in range(args.rounds + 1)
            ][1:]  # the first round is a warm-up
        finally:
            remote.close()
    for name, values in zip(("LLM", "AsyncLLM"), zip(*rates, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):,.0f} tok/s with {args.streams} streams")
    shares = [streamed / whole for whole, streamed in rates]
    each = " ".join(f"{share:.3f}" for share in shares)
    print(f"AsyncLLM / LLM: {statistics.median(shares):.3f}, the median of the rounds {each}")


def rate(run: Any, args: argparse.Namespace) -> float:
    start = time.perf_counter()
    run()
    return float(args.streams * args.max_tokens / (time.perf_counter() - start))


async def stream_all(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams) -> None:
    async def read(prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, params):
            pass

    await asyncio.gather(*(read(prompt) for prompt in prompts))


def stream_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def parse_args() -> argparse.Namespace:
    parser = stream_parser(__doc__)
    parser.add_argument("--dummy", action="store_true", help="random weights, no tokenizer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
