"""Measure the cost of HTTP and of a dashboard: throughput compared to `AsyncLLM` alone.

    python -m benchmarks.engine.http_streams [--model smollm2] [--streams 64] [--rounds 3]

All use one engine and take turns; the HTTP clients run in another process, and so does the
subscriber to the engine's events. On a CPU, HTTP should reach 95% of the throughput of `AsyncLLM`,
and 98% of its own with a subscriber. CPU time is compared too, as it is more reliable on a shared
machine (Linux only).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.async_streams import stream_all, stream_parser
from benchmarks.models import model_path
from nanovllm import AsyncLLM, SamplingParams
from nanovllm.serve.http_server import listen, make_server
from nanovllm.serve.server_options import ServerOptions


def main() -> None:
    args = stream_parser(__doc__).parse_args()
    params = SamplingParams(temperature=0.6, max_tokens=args.max_tokens, ignore_eos=True)
    rounds = []
    with served(args) as (llm, streams):
        for _ in range(args.rounds + 1):
            alone = measure(lambda: asyncio.run(stream_all(llm, streams.prompts, params)))
            unsubscribed = measure(streams.post_all)
            with subscriber(streams.port):
                subscribed = measure(streams.post_all)
            rounds.append(Round(alone, unsubscribed, subscribed))
            print(rounds[-1].describe(args.streams * args.max_tokens), flush=True)
    for name in ("seconds", "core_seconds"):
        http = statistics.median(
            getattr(each.alone, name) / getattr(each.unsubscribed, name) for each in rounds[1:]
        )
        subscribed_share = statistics.median(
            getattr(each.unsubscribed, name) / getattr(each.subscribed, name) for each in rounds[1:]
        )
        print(f"by {name}: HTTP / AsyncLLM {http:.3f}, subscribed / not {subscribed_share:.3f}")


class Streams:
    """Clients of a server on a port, in a child process; each sends one prompt."""

    def __init__(self, port: int, prompts: list[list[int]], max_tokens: int) -> None:
        self.port, self.prompts = port, prompts
        self._task = json.dumps([port, prompts, max_tokens])
        command = [sys.executable, "-m", "benchmarks.engine.http_streams", "--client"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def post_all(self) -> None:
        """Send all prompts; return when every stream has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(self._task, file=self._process.stdin, flush=True)
        self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[AsyncLLM, Streams]]:
    """Yield an engine, served by this process, and its clients."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(64)] for _ in range(args.streams)]
    llm = AsyncLLM(model_path(args.model), max_model_len=1024, max_num_seqs=args.streams)
    server = make_server(llm, ServerOptions(("model",)))
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    streams = Streams(listener.getsockname()[1], prompts, args.max_tokens)
    try:
        yield llm, streams
    finally:
        streams.close()
        server.should_exit = True
        thread.join()
        llm.close()


class Cost(NamedTuple):
    seconds: float
    core_seconds: float  # CPU time of all processes: least affected by other load


class Round(NamedTuple):
    alone: Cost
    unsubscribed: Cost
    subscribed: Cost

    def describe(self, num_tokens: int) -> str:
        return "; ".join(
            f"{name} {num_tokens / cost.seconds:,.0f} tok/s, {cost.core_seconds:.2f} s of CPU time"
            for name, cost in zip(("AsyncLLM", "HTTP", "subscribed"), self, strict=True)
        )


def measure(run: Callable[[], object]) -> Cost:
    start, cores = time.perf_counter(), core_seconds(os.getpid())
    run()
    return Cost(time.perf_counter() - start, core_seconds(os.getpid()) - cores)


def core_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its descendants so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return used + sum(core_seconds(int(child)) for child in " ".join(lists).split())


@contextlib.contextmanager
def subscriber(port: int) -> Iterator[None]:
    """Run another process that subscribes to the engine's events."""
    script = f"import urllib.request as u; list(u.urlopen('http://127.0.0.1:{port}/engine/events'))"
    process = subprocess.Popen([sys.executable, "-c", script])
    time.sleep(1.0)  # until it is connected
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_client() -> None:
    """Read a port, prompts and a length from each line; report when all streams have ended."""
    for line in sys.stdin:
        asyncio.run(_post_all(*json.loads(line)))
        print("done", flush=True)


async def _post_all(port: int, prompts: list[list[int]], max_tokens: int) -> None:
    await asyncio.gather(*(_post(port, prompt, max_tokens) for prompt in prompts))


async def _post(port: int, prompt: list[int], max_tokens: int) -> None:
    """Read one stream to its end, with as little work as possible."""
    fields = {"temperature": 0.6, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    end = b""
    while piece := await reader.read(2**16):
        end = (end + piece)[-100:]
    assert b"[DONE]" in end, end
    writer.close()


if __name__ == "__main__":
    run_client() if sys.argv[1:] == ["--client"] else main()
