"""Measure a long prompt beside a running stream, on a server whose cores other processes use.

    python -m benchmarks.engine.busy_server [--busy 8] [--tokens 1001] [--rounds 3]

Two servers, with the default threads and with one, take turns. The first should take at most 1.5
times as long as the second, both for the prompt and for the longest gap of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx

from benchmarks.engine.cpu_choices import busy_programs
from benchmarks.engine.resident_memory import wait_until_up
from nanovllm.cli.options import at_least

LIMIT = 1.5
STREAM_TOKENS_BEFORE = 16  # tokens of the stream before the prompt arrives


@dataclass(frozen=True, slots=True)
class Round:
    seconds: float  # from the prompt's arrival to its first token
    longest_gap: float  # of the stream, meanwhile


@dataclass(slots=True)
class Server:
    options: list[str]
    port: int
    rounds: list[Round] = field(default_factory=list)

    def start(self, model: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nanovllm", "serve", model, "--port", str(self.port)]
        return subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def median(self, name: str) -> float:
        return statistics.median(getattr(each, name) for each in self.rounds)


def main() -> int:
    args = parse_args()
    servers = [Server([], free_port()), Server(["--threads", "1"], free_port())]
    processes = [server.start(args.model) for server in servers]
    try:
        for server, process in zip(servers, processes, strict=True):
            wait_until_up(process, f"{server.url}/health")
        with busy_programs(args.busy):
            for _ in range(args.rounds):
                for server in servers:
                    server.rounds.append(asyncio.run(measure(server.url, args.tokens)))
                    print(" ".join(server.options) or "default", server.rounds[-1], flush=True)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    default, single = servers
    ratios = [default.median(name) / single.median(name) for name in ("seconds", "longest_gap")]
    print(f"default / one thread: prompt {ratios[0]:.2f}, longest gap {ratios[1]:.2f}")
    return int(max(ratios) > LIMIT)


async def measure(url: str, num_tokens: int) -> Round:
    rng = random.Random(time.time_ns())  # no prefix hits
    prompt = [rng.randrange(1000, 10_000) for _ in range(num_tokens)]
    arrivals: list[float] = []
    has_begun = asyncio.Event()

    async def stream(client: httpx.AsyncClient) -> None:
        body = {"prompt": prompt[:8], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter())
                if len(arrivals) == STREAM_TOKENS_BEFORE:
                    has_begun.set()

    async with httpx.AsyncClient(timeout=600) as client:
        task = asyncio.create_task(stream(client))
        await has_begun.wait()
        begin = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1}
        (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
        end = time.perf_counter()
        task.cancel()
    times = [begin, *(each for each in arrivals if begin < each < end), end]
    longest_gap = max(after - before for before, after in itertools.pairwise(times))
    return Round(end - begin, longest_gap)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--busy", type=at_least(0), default=8, help="busy processes; default: 8")
    parser.add_argument("--tokens", type=at_least(1), default=1001, help="default: 1001")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="default: 3")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
