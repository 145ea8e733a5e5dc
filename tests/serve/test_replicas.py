"""Several engines behind one AsyncLLM: routing, and the death of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.batch.batch_engine import RowEngine, RowOptions
from nanovllm.batch.progress_file import ProgressFile
from nanovllm.batch.rows import scan
from nanovllm.batch.run_batch import OnLine, run_job
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.serve.server_options import ServerOptions
from tests.batch.test_jobs import read_lines, write_rows
from tests.serve.byte_model import make_byte_model
from tests.serve.running import Running, running

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 64,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 1024,
}
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = {"max_tokens": 3800, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model"), max_len=4096)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(path, data_parallel_size=2, restart_core=True, **OPTIONS)
    yield llm
    llm.close()


def shared_prefixes() -> list[list[int]]:
    """Return 64 prompts in random order, with 8 different prefixes of four blocks."""
    rng = random.Random(0)
    beginnings = [rng.choices(range(256), k=64) for _ in range(8)]
    prompts = [[*beginnings[i % 8], *rng.choices(range(256), k=9)] for i in range(64)]
    rng.shuffle(prompts)
    return prompts


async def answer(llm: AsyncLLM, prompt: list[int]) -> list[int]:
    pieces = [piece async for piece in llm.generate(prompt, SHORT)]
    assert pieces[-1].output is not None
    return pieces[-1].output.token_ids


async def answer_all(llm: AsyncLLM, prompts: list[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))


@pytest.mark.slow
def test_two_engines_hit_and_answer_as_one_does(llm: AsyncLLM, path: Path) -> None:
    prompts = shared_prefixes()
    with LLM(path, **OPTIONS) as alone:
        outputs = alone.generate(prompts, SHORT, use_tqdm=False)
    wanted = [output.token_ids for output in outputs]
    hits = sum(output.num_cached_tokens for output in outputs)
    assert asyncio.run(answer_all(llm, prompts)) == wanted
    both = [replica.stats for replica in llm.replicas]
    assert sum(each.num_cache_queries for each in both) == sum(map(len, prompts))
    assert llm.stats.num_cache_hits >= 0.9 * hits
    loads = [each.num_cache_queries for each in both]
    assert max(loads) < 2 * min(loads)
    assert llm._router.loads == {0: 0, 1: 0}


@pytest.mark.slow
def test_what_operators_see(llm: AsyncLLM) -> None:
    asyncio.run(answer_all(llm, shared_prefixes()))
    with running(llm) as server:
        text = server.http.get("/metrics").text
        for number, replica in enumerate(llm.replicas):
            labels = f'{{engine="{number}",model_name="tiny"}}'
            queries = float(replica.stats.num_cache_queries)
            assert f"vllm:prefix_cache_queries_total{labels} {queries}" in text
            assert f"vllm:engine_up{labels} 1.0" in text
            with server.http.stream("GET", f"/engine/events?engine={number}") as response:
                event = json.loads(next(response.iter_lines()).removeprefix("data: "))
                assert (event["engine"], event["engines"]) == (number, [0, 1])
                assert event["stats"]["num_cache_queries"] == replica.stats.num_cache_queries
        assert server.http.get("/engine/events?engine=2").status_code == 400
        assert server.http.get("/health").content == b""
        events = server.http.get("/trace?seconds=0.2").json()["traceEvents"]
        named = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
        assert named["engine 0: host"] == 1
        assert len(set(named.values())) == len(named) == 6


@pytest.mark.slow
def test_aborts_reach_the_engine_that_answers(llm: AsyncLLM) -> None:
    async def stop_early(prompt: list[int]) -> str | None:
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        reason = None
        async for piece in llm.generate(prompt, params):
            llm.abort(piece.seq_id)
            reason = None if piece.output is None else piece.output.finish_reason
        return reason

    async def main() -> list[str | None]:
        return await asyncio.gather(*(stop_early([i] * 40) for i in range(4)))

    assert asyncio.run(main()) == ["abort"] * 4
    assert llm._router.loads == {0: 0, 1: 0}


class Reader:
    """A stream that is read line by line."""

    def __init__(self, client: httpx.AsyncClient, prompt: str) -> None:
        self.lines: list[str] = []
        self.has_news = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, {**LONG, "prompt": prompt}))

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                self.lines += [line] if line else []
                self.has_news.set()

    async def next(self) -> None:
        """Wait for another line."""
        self.has_news.clear()
        await self.has_news.wait()

    @property
    def error(self) -> Any:
        assert self.lines[-1] == "data: [DONE]"
        return json.loads(self.lines[-2].removeprefix("data: "))["error"]


@pytest.mark.slow
def test_one_of_two_is_killed_and_comes_back(llm: AsyncLLM) -> None:
    async def kill_under_load(server: Running) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=480) as client:
            readers = [Reader(client, chr(97 + i) * 40) for i in range(8)]
            await asyncio.gather(*(reader.next() for reader in readers))
            homes = {stream.core.number for stream in llm.client.streams}
            num_doomed = sum(stream.core.number == 1 for stream in llm.client.streams)
            assert homes == {0, 1}
            os.kill(llm.replicas[1].pid, signal.SIGKILL)
            while sum(reader.task.done() for reader in readers) < num_doomed:
                await asyncio.sleep(0.01)
            body = {"prompt": "b", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            for reader in readers:
                if reader.task.done():
                    assert "engine core 1" in reader.error["message"]
                    assert "it is being restarted" in reader.error["message"]
                    assert reader.error["type"] == "service_unavailable_error"
                else:
                    await reader.next()
                    reader.task.cancel()

    with running(llm) as server:
        asyncio.run(kill_under_load(server))
        deadline = time.monotonic() + 480
        while llm.replicas[1].error is not None:
            assert server.http.get("/health").status_code == 200
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [replica.num_restarts for replica in llm.replicas] == [0, 1]
        asyncio.run(answer_all(llm, shared_prefixes()))
        assert min(replica.stats.num_cache_queries for replica in llm.replicas) > 0


@pytest.mark.slow
def test_rows_of_a_job_move_to_the_other_engine(llm: AsyncLLM, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{'abcdefgh'[i % 8] * 40} {i}", "max_tokens": 30, "temperature": i % 2}
        for i in range(60)
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    server = ServerOptions(("tiny",), generation_config="vllm")
    answers = RowEngine(RowOptions(EngineConfig("tiny"), server, is_raw=True), llm)

    def run(name: str, on_line: OnLine) -> list[Any]:
        found = scan(path)
        progress_file = ProgressFile(tmp_path / name, {}, found.num_rows, overwrite=False)
        with contextlib.closing(progress_file):
            asyncio.run(run_job(path, progress_file, answers, max_concurrency=16, on_line=on_line))
        assert progress_file.num_errors == 0
        return sorted(read_lines(progress_file.output), key=lambda line: line["index"])

    def kill(line: Any) -> None:
        lines.append(line)
        busy = {stream.core.number for stream in llm.client.streams}
        if not killed and len(lines) >= 10 and 1 in busy:
            killed.append(llm.replicas[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    lines: list[Any] = []
    killed: list[int] = []
    wanted = run("undisturbed.jsonl", lambda line: None)
    assert run("disturbed.jsonl", kill) == wanted
    assert len(wanted) == 60
    assert killed


@pytest.mark.slow
def test_without_restarts_the_rest_goes_on_until_none_is_left(path: Path) -> None:
    llm = AsyncLLM(path, data_parallel_size=2, **OPTIONS)

    def kill(number: int) -> None:
        os.kill(llm.replicas[number].pid, signal.SIGKILL)
        while llm.replicas[number].error is None:
            time.sleep(0.01)

    with contextlib.closing(llm), running(llm) as server:
        kill(0)
        assert "killed by signal 9" in server.http.get("/health").json()["lost_engines"]["0"]
        assert (
            'vllm:engine_up{engine="0",model_name="tiny"} 0.0' in server.http.get("/metrics").text
        )
        assert server.http.get("/engine/events?engine=0").status_code == 503
        with server.http.stream("GET", "/engine/events") as response:
            event = json.loads(next(response.iter_lines()).removeprefix("data: "))
            assert event["engine"] == 1
        asyncio.run(answer_all(llm, shared_prefixes()[:4]))
        kill(1)
        assert server.http.get("/health").status_code == 503
        with pytest.raises(EngineError, match="killed by signal 9"):
            asyncio.run(answer(llm, [1]))


def test_one_engine_alone_takes_no_replicas(path: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size is supported by AsyncLLM"):
        LLM(path, data_parallel_size=2, **OPTIONS)
