"""Measure a small request, and /health, beside a request of many prompts with prompt logprobs.

    python -m benchmarks.engine.large_request [--prompts 60] [--length 1900] [--rounds 10]

The small request should take at most 3 times as long as alone, and /health at most 0.5 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time

import httpx

from benchmarks.engine.busy_server import free_port
from benchmarks.engine.resident_memory import wait_until_up
from nanovllm.cli.options import at_least

LIMIT, HEALTH_LIMIT = 3.0, 0.5


def main() -> int:
    args = parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "nanovllm", "serve", args.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_up(server, f"{url}/health")
        return asyncio.run(measure(url, args))
    finally:
        server.terminate()
        server.wait()


async def measure(url: str, args: argparse.Namespace) -> int:
    async with httpx.AsyncClient(timeout=3600) as client:
        alone = [await small(client, url, args.small) for _ in range(args.rounds + 1)][1:]
        prompts = [random_prompt(args.length) for _ in range(args.prompts)]
        body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
        large = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await asyncio.sleep(3.0)
        beside, health = [], []
        for _ in range(args.rounds):
            begin = time.perf_counter()
            (await client.get(f"{url}/health")).raise_for_status()
            health.append(time.perf_counter() - begin)
            beside.append(await small(client, url, args.small))
            await asyncio.sleep(0.5)
        assert not large.done(), "the large request ended early: give it more prompts"
        large.cancel()
    ratio = statistics.median(beside) / statistics.median(alone)
    print(
        "alone", [round(each, 2) for each in alone], "beside", [round(each, 2) for each in beside]
    )
    print(f"beside / alone: {ratio:.2f} (medians), /health at most {max(health):.3f} s")
    return int(ratio > LIMIT or max(health) > HEALTH_LIMIT)


async def small(client: httpx.AsyncClient, url: str, length: int) -> float:
    begin = time.perf_counter()
    body = {"prompt": random_prompt(length), "max_tokens": 1}
    (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
    return time.perf_counter() - begin


def random_prompt(length: int) -> list[int]:
    rng = random.Random(time.time_ns())  # no prefix hits
    return [rng.randrange(1000, 10_000) for _ in range(length)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--prompts", type=at_least(1), default=60, help="default: 60")
    parser.add_argument("--length", type=at_least(1), default=1900, help="default: 1900")
    parser.add_argument("--small", type=at_least(1), default=100, help="tokens; default: 100")
    parser.add_argument("--rounds", type=at_least(1), default=10, help="default: 10")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
