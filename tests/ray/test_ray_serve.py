"""A Ray Serve application: two engines behind the routes of `nanovllm serve`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from nanovllm import AsyncLLM
from nanovllm.errors import ConfigError
from tests.ray.clusters import ray_cluster
from tests.serve.byte_model import make_byte_file
from tests.serve.running import Running, running

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.slow, needs_ray]

EXAMPLE = Path(__file__).parents[2] / "deploy" / "ray-serve.yaml"
BLOCK_SIZE = 16
ENGINE = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 32, "num_kvcache_blocks": 1024,
}  # fmt: skip
SCALING = {
    "min_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 8, "upscale_delay_s": 0,
    "look_back_period_s": 2, "metrics_interval_s": 1,
}  # fmt: skip
# Requests that run until they are aborted.
ENDLESS = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
DEADLINE = 480.0  # for slow operations on a slow and busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_file(tmp_path_factory.mktemp("ray-serve"), 4096)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """Run the application of the example file with another model and other sizes; yield its URL."""
    from ray import serve
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

    from nanovllm.ray import build_app

    args = yaml.safe_load(EXAMPLE.read_text())["applications"][0]["args"]
    other = {"model": str(model), "max_model_len": "4096", "block_size": str(BLOCK_SIZE)}
    args |= {**ENGINE, **SCALING, **other, "served_model_name": ["tiny", "org/tiny"]}
    port = free_port()
    with ray_cluster(num_nodes=2, num_cpus=3):
        try:
            serve.start(proxy_location="HeadOnly", http_options={"port": port})
            serve.run(build(build_app, args), name="nanovllm", route_prefix="/models")
            yield f"http://127.0.0.1:{port}/models"
        finally:
            serve.shutdown()


def free_port() -> int:
    """Return a port outside the ephemeral range, so that no outgoing connection takes it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Running]:
    """Run the server of `nanovllm serve` with the same options."""
    llm = AsyncLLM(model, max_model_len=4096, kvcache_block_size=BLOCK_SIZE, **ENGINE)
    try:
        with running(llm) as server:
            yield server
    finally:
        llm.close()


def test_the_example_is_what_serve_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    from nanovllm.ray import build_app

    config = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    assert config.applications[0].import_path == f"nanovllm.ray:{build_app.__name__}"
    assert {each.name for each in config.applications[0].deployments} <= {"Ingress", "Engine"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"port": "8000"}, "port is not supported here"),
        ({"max_num_seqs": "many"}, "max-num-seqs"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    from nanovllm.ray import build_app

    with pytest.raises(ConfigError, match=complaint):
        build_app({"model": "tiny", "device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({}, 1, 1), ({"min_replicas": "3"}, 3, 3), ({"min_replicas": "0"}, 0, 1)],
)
def test_replicas_may_be_told_as_texts(options: dict[str, str], least: int, most: int) -> None:
    """`serve run` passes options as strings."""
    from nanovllm.config import EngineConfig
    from nanovllm.ray.ray_serve import _autoscaling

    scaling = _autoscaling(dict(options), EngineConfig("tiny"))
    assert (scaling.min_replicas, scaling.max_replicas) == (least, most)


CHAT = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8}
REQUESTS = {
    "/v1/completions": [
        {"prompt": "x" * 40, "max_tokens": 16, "temperature": 0},
        {"prompt": ["one", "two", "three"], "max_tokens": 8, "seed": 5, "n": 2, "logprobs": 2},
        {"prompt": "x", "max_tokens": 99999},
        {"prompt": "x", "unheard_of": 1},
        {"prompt": "x", "logit_bias": {"999999": 1}},
        {"prompt": "x", "model": "other"},
    ],
    "/v1/chat/completions": [{**CHAT, "temperature": 0}, {**CHAT, "temperature": 9}],
    "/v1/messages": [{**CHAT, "model": "tiny", "temperature": 0}, {**CHAT, "model": "other"}, {}],
    "/v1/messages/count_tokens": [{"messages": CHAT["messages"]}],
    "/v1/responses": [{"input": "Why?", "max_output_tokens": 8, "temperature": 0}],
    "/v1/embeddings": [{"input": ["a", "b"]}],
    "/v1/rerank": [{"query": "x", "documents": ["y"]}, {"query": "x"}],
    "/tokenize": [{"prompt": "Why?"}],
    "/nowhere": [{}],
}
CASES = [(path, body) for path, bodies in REQUESTS.items() for body in bodies]


def comparable(value: Any) -> Any:
    """Return a response without the fields that differ between requests."""
    if isinstance(value, dict):
        skipped = ("id", "created", "created_at", "completed_at", "root", "cached_tokens")
        return {name: comparable(each) for name, each in value.items() if name not in skipped}
    if isinstance(value, list):
        return [comparable(each) for each in value]
    return pytest.approx(value, rel=1e-4) if isinstance(value, float) else value


def test_every_route_answers_as_one_engine_does(client: httpx.Client, alone: Running) -> None:
    for path, body in CASES:
        ours, theirs = client.post(path, json=body), alone.post(path, **body)
        assert ours.status_code == theirs.status_code, (path, body, ours.text)
        assert comparable(ours.json()) == comparable(theirs.json()), (path, body)
    for path in ("/v1/models", "/load", "/version"):
        ours, theirs = client.get(path), alone.http.get(path)
        assert ours.status_code == theirs.status_code == 200
        assert comparable(ours.json()) == comparable(theirs.json())
    assert client.get("/health").status_code == 200
    assert "vllm:num_requests_running" in client.get("/metrics").text
    assert client.get("/trace", params={"seconds": 0.1}).json()["traceEvents"]
    assert client.get("/openapi.json").status_code == client.get("/").status_code == 200


def test_openais_client_reads_a_stream_while_it_is_made(
    client: httpx.Client, alone: Running
) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "q", "temperature": 0, "stream": True}
    with OpenAI(base_url=f"{client.base_url}v1", api_key="any", max_retries=0) as openai:
        texts = [
            [event.choices[0].text for event in each.completions.create(**request, max_tokens=64)]
            for each in (openai, alone.openai)
        ]
        assert "".join(texts[0]) == "".join(texts[1])
        stream = openai.completions.create(
            **request, max_tokens=4000, extra_body={"ignore_eos": True}
        )
        next(stream)
        assert client.get("/load").json() == {"server_load": 1}  # it is still running
        stream.close()
    wait_until(lambda: client.get("/load").json() == {"server_load": 0})
    wait_until(lambda: all(each.num_running == 0 for each in engine_stats()))
    tokens = sum(each.num_decode_tokens for each in engine_stats())
    assert tokens < 4000  # the engine aborted it


def test_requests_with_a_prefix_reach_the_engine_that_has_it(client: httpx.Client) -> None:
    before = [each.num_cache_hits for each in engine_stats()]
    prefixes = [letter * 5 * BLOCK_SIZE for letter in "abcd"]
    cached = []
    for number in range(4):
        for prefix in prefixes:
            body = {"prompt": f"{prefix} {number}", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0] * 4 + [5 * BLOCK_SIZE] * 12
    after = [each.num_cache_hits for each in engine_stats()]
    assert all(new > old for new, old in zip(sorted(after), sorted(before), strict=True))


def test_a_killed_engine_fails_its_streams_alone(client: httpx.Client, url: str) -> None:
    before, killed = engines_up(client), engine_processes()[0]
    lines = asyncio.run(break_one_stream(url, lambda: os.kill(killed, signal.SIGKILL)))
    assert_ends_with_error(lines)
    assert_answers(client)
    wait_for_another_engine(client, before)


def test_an_engine_without_its_core_gets_no_requests_and_is_replaced(
    client: httpx.Client, url: str
) -> None:
    """The engine must exit before Serve notices: failing requests, it would have the least load.

    A hung core is reported to its replica in the same way: tests/serve/test_async_llm.py.
    """
    before, core = engines_up(client), core_of(engine_processes()[0])
    lines = asyncio.run(break_one_stream(url, lambda: os.kill(core, signal.SIGKILL)))
    assert_ends_with_error(lines)
    assert_answers(client)
    wait_for_another_engine(client, before)
    assert client.get("/health").status_code == 200
    newest = max(map(int, engines_up(client)))
    with client.stream("GET", f"/engine/events?engine={newest}") as response:
        event = json.loads(next(response.iter_lines()).removeprefix("data: "))
    assert (event["engine"], set(map(str, event["engines"]))) == (newest, engines_up(client))


def test_more_requests_start_another_engine(url: str) -> None:
    async def ask_again_and_again(client: httpx.AsyncClient, number: int) -> None:
        while True:
            body = {"prompt": f"{number}", **ENDLESS}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass

    async def load() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE) as client:
            num_clients = 3 * SCALING["target_ongoing_requests"]
            tasks = [
                asyncio.create_task(ask_again_and_again(client, number))
                for number in range(num_clients)
            ]
            await asyncio.to_thread(wait_until, lambda: num_engines() == 3)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    wait_until(lambda: num_engines() == 2)
    asyncio.run(load())


async def break_one_stream(url: str, fail: Callable[[], None]) -> list[str]:
    """Stream from both engines, make one of them fail, and return the lines of its stream.

    The other stream continues: it has one more line after that.
    """
    async with (
        httpx.AsyncClient(base_url=url, timeout=DEADLINE) as client,
        AsyncExitStack() as stack,
    ):
        streams = []
        for prompt in ("left", "right"):
            body = {"prompt": prompt, **ENDLESS}
            opened = client.stream("POST", "/v1/completions", json=body)
            lines = (await stack.enter_async_context(opened)).aiter_lines()
            await anext(lines)
            streams.append(lines)
        fail()
        news: list[list[str]] = [[], []]
        tasks = [asyncio.create_task(collect(*each)) for each in zip(streams, news, strict=True)]
        done, (other,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        survivor = news[tasks.index(other)]
        num_lines = len(survivor)
        while len(survivor) == num_lines:
            assert not other.done()
            await asyncio.sleep(0.01)
        assert not any("error" in line for line in survivor)
        other.cancel()
    return news[1 - tasks.index(other)]


async def collect(lines: Any, found: list[str]) -> None:
    async for line in lines:
        if line:
            found.append(line)


def assert_ends_with_error(lines: list[str]) -> None:
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable_error"
    assert lines[-1] == "data: [DONE]"


def assert_answers(client: httpx.Client) -> None:
    for number in range(4):
        body = {"prompt": f"{number} after that", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200


def engine_stats() -> list[Any]:
    from ray import serve

    engines = serve.get_deployment_handle("Engine", "nanovllm")
    return [each.stats for each in engines.broadcast("counts").results(timeout_s=DEADLINE)]


def engines_up(client: httpx.Client) -> set[str]:
    """Return the numbers of the engines that the ingress considers healthy."""
    text = client.get("/metrics").text
    return set(re.findall(r'^vllm:engine_up{engine="(\d+)".* 1.0$', text, re.MULTILINE))


def wait_for_another_engine(client: httpx.Client, before: set[str]) -> None:
    wait_until(lambda: len(now := engines_up(client)) == 2 and now != before)


def num_engines() -> int:
    """Return the number of engines that are running or starting."""
    from ray import serve

    states = serve.status().applications["nanovllm"].deployments["Engine"].replica_states
    return sum(num for state, num in states.items() if state != "STOPPING")


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the title of each descendant of this process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            title = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # the process has ended
            continue
        found[int(folder.name)] = parent, title

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in found and is_ours(found[pid][0]))

    return {pid: found[pid] for pid in found if is_ours(pid)}


def engine_processes() -> list[int]:
    return [pid for pid, (_, title) in processes().items() if ":Engine" in title]


def core_of(engine: int) -> int:
    (core,) = [pid for pid, (parent, _) in processes().items() if parent == engine]
    return core


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)
