"""Many concurrent streams, repeated engine crashes, broken connections, hours of load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import AsyncLLM
from nanovllm.serve import replica
from tests.cli.test_serve import ENGINE, ServeProcess
from tests.serve.byte_model import make_byte_model
from tests.serve.running import Running, running
from tests.serve.test_generated_requests import BODIES, settle
from tests.serve.test_restarts import until_healthy

pytestmark = [pytest.mark.endurance, pytest.mark.slow]

NUM_STREAMS = 256
NO_LIMITS = httpx.Limits(max_connections=None)
SIGNS = {signal.SIGKILL: "killed by signal 9", signal.SIGSTOP: "sent no heartbeat for 4.5 s"}
MAX_GROWTH = 20 * 2**20


async def read_stream(client: httpx.AsyncClient, lines: list[str], **body: Any) -> None:
    body = {"prompt": "x", "ignore_eos": True, "stream": True, **body}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines += [line.removeprefix("data: ")] if line else []


def test_256_streams_at_once(server: Running) -> None:
    num_free, num_tokens = server.llm.stats.num_free_blocks, 20

    async def stream_all() -> list[list[str]]:
        streams: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
        body = {"max_tokens": num_tokens, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=NO_LIMITS) as client:
            tasks = [read_stream(client, lines, **body) for lines in streams]
            await asyncio.gather(*tasks)
        return streams

    for lines in asyncio.run(stream_all()):
        chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == num_tokens
        assert chunks[-1]["finish_reason"] == "length"
        assert lines[-1] == "[DONE]"
    settle(server, num_free)


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_byte_model(tmp_path_factory.mktemp("restarting"))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 128}
    llm = AsyncLLM(folder, restart_core=True, **options)
    try:
        with running(llm) as server:
            yield server
    finally:
        llm.close()


@pytest.mark.exhaustive  # tests/serve/test_restarts.py tests one restart
@pytest.mark.parametrize("number", SIGNS, ids=lambda number: number.name)
def test_engines_that_fail_again_and_again(
    restarting: Running,
    number: signal.Signals,
    count: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "SOON_SECONDS", 0.0)  # no failure counts as early
    before = restarting.llm.replicas[0].num_restarts
    for turn in range(count(10)):
        until_healthy(restarting.http)
        asyncio.run(fail_under_load(restarting, number, random.Random(turn)))
    until_healthy(restarting.http)
    assert restarting.llm.replicas[0].num_restarts == before + count(10)
    settle(restarting, 128)


async def fail_under_load(server: Running, number: signal.Signals, chance: random.Random) -> None:
    streams: list[list[str]] = [[] for _ in range(8)]
    async with httpx.AsyncClient(base_url=server.url, timeout=480) as client:
        await read_stream(client, [], max_tokens=2)  # the very first step may take longer
        reads = [read_stream(client, lines, max_tokens=900) for lines in streams]
        tasks = [asyncio.create_task(read) for read in reads]
        while not all(streams):
            await asyncio.sleep(0.01)
        await asyncio.sleep(chance.random() * 0.2)
        os.kill(server.llm.replicas[0].pid, number)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for lines in streams:
        error = json.loads(lines[-2])["error"]
        assert error["type"] == "service_unavailable_error"
        assert SIGNS[number] in error["message"]
        assert lines[-1] == "[DONE]"


def test_broken_connections_break_nothing(server: Running, count: Callable[[int], int]) -> None:
    """Truncated bodies, endless headers, and bytes that are not HTTP at all."""
    num_free = server.llm.stats.num_free_blocks
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    body = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True}).encode()
    for number in range(count(1000)):
        chance = random.Random(number)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        whole = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        cut = whole[: chance.randrange(len(whole) + 1)]
        sent = chance.choice((cut, cut, b"x" * 200_000, bytes(chance.choices(range(256), k=99))))
        with socket.create_connection(address, timeout=60) as connection:
            try:
                connection.sendall(sent)
                if chance.random() < 0.5 and sent is not whole:
                    connection.shutdown(socket.SHUT_WR)
                    assert not connection.recv(4096).startswith(b"HTTP/1.1 5")
            except OSError:
                pass  # the client need not read to the end
    settle(server, num_free)
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.exhaustive
def test_an_hour_of_load_takes_no_more_memory(tmp_path: Path) -> None:
    seconds = 3600
    options = ("--num-kvcache-blocks", "512", "--max-num-seqs", "16")
    server = ServeProcess(str(make_byte_model(tmp_path)), *ENGINE, *options)
    try:
        ask_for_everything(server.url)
        asyncio.run(load(server.url, seconds / 3))
        before = memory_of(server.process.pid)
        num_requests = asyncio.run(load(server.url, seconds))
        growth = {pid: size - before[pid] for pid, size in memory_of(server.process.pid).items()}
        print(f"{num_requests} requests in {seconds} s; bytes more by process: {growth}")
        assert num_requests > seconds / 4
        assert sum(growth.values()) < MAX_GROWTH
    finally:
        server.process.kill()


def ask_for_everything(url: str) -> None:
    """Load all lazy parts: a grammar, for example, loads a tokenizer in the engine's process."""
    for path, whole in BODIES.items():
        body = {name: whole[name] for name in whole if name != "allowed_token_ids"}
        response = httpx.post(url + path, json=body, timeout=480)
        assert response.status_code == 200, response.text


async def load(url: str, seconds: float) -> int:
    """Send all kinds of requests, eight at a time; every tenth client disconnects."""
    end = time.monotonic() + seconds
    num_requests = 0

    async def ask_again_and_again(chance: random.Random, client: httpx.AsyncClient) -> None:
        nonlocal num_requests
        while time.monotonic() < end:
            path = chance.choice(list(BODIES))
            optional = [name for name in BODIES[path] if chance.random() < 0.3]
            needed = {"prompt", "messages", "input", "tokens", "max_tokens", "max_output_tokens"}
            body = {name: BODIES[path][name] for name in {*optional, *needed} & {*BODIES[path]}}
            if "max_tokens" in body:
                body["max_tokens"] = chance.choice((3, 30))
            task = asyncio.create_task(client.post(path, json=body))
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 0.1)
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, (httpx.Response, asyncio.CancelledError)), result
            if isinstance(result, httpx.Response):
                assert result.status_code in (200, 400), result.text
            num_requests += 1

    async with httpx.AsyncClient(base_url=url, timeout=480) as client:
        await asyncio.gather(*(ask_again_and_again(random.Random(i), client) for i in range(8)))
    return num_requests


def memory_of(pid: int) -> dict[int, int]:
    """Return the memory in bytes of a process and its descendants, keyed by process."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = " ".join(thread.read_text() for thread in threads).split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    sizes = {pid: pages * os.sysconf("SC_PAGE_SIZE")}
    for child in children:
        sizes |= memory_of(int(child))
    return sizes
