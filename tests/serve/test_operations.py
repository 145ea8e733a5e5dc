"""Operation of a server: keys, limits, health, metrics, and clients that disconnect."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, RateLimitError
from pydantic import ValidationError

from nanovllm import __version__
from nanovllm.config import EngineConfig
from nanovllm.errors import EngineError
from nanovllm.outputs import StreamPiece
from nanovllm.serve import http_server as run
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.http_errors import json_pieces, to_json
from nanovllm.serve.http_responses import PIECE_BYTES, WholeResponse
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.openai import completions, embeddings
from nanovllm.serve.openai import openai_logprobs as logprobs
from nanovllm.serve.protocol import ChatRequest
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/rerank"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
METRICS = """
num_requests_running num_requests_waiting kv_cache_usage_perc kv_cache_free_blocks
kv_cache_held_blocks prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_total generation_tokens_total num_preemptions_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total
cache_config_info
"""


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(FakeLLM(), api_key=("first", "second"), max_body_bytes=1000) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_route_needs_a_key(guarded: Running, method: str, path: str) -> None:
    wrong = (
        {},
        {"authorization": b"Bearer firs"},
        {"authorization": b"first"},
        {"x-api-key": b"\xff"},
    )
    for headers in wrong:
        response = guarded.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"


def test_either_key_opens_either_way(guarded: Running) -> None:
    for headers in ({"authorization": "bearer second"}, {"x-api-key": "first"}):
        assert guarded.http.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ping"):
        assert guarded.http.get(path).status_code == 200
    with pytest.raises(AuthenticationError):
        guarded.openai.models.list()
    assert guarded.openai.with_options(api_key="first").models.list().data[0].id == "tiny"


def test_bodies_are_bounded_however_they_come(guarded: Running) -> None:
    def in_chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(200):
            yield b"x" * 10

    headers = {"x-api-key": "first", "content-type": "application/json"}
    for content in (b'{"prompt": "' + b"x" * 1000 + b'"}', in_chunks()):
        response = guarded.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]


def test_a_body_of_too_many_values_is_not_parsed() -> None:
    """A million small values take much longer to parse than a text of the same size."""
    with running(FakeLLM()) as server:
        for body, status in ((b'{"prompt": [' + b"1," * 500_001, 413), (b'{"prompt": [1,', 400)):
            headers = {"content-type": "application/json"}
            response = server.http.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == status
            assert ("500,000 values" in response.json()["error"]["message"]) == (status == 413)


def test_one_wrong_item_of_many_is_enough() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest(messages=[{}] * 1000)
    assert len(caught.value.errors()) == 1


LONG = "x" * 50_000  # too long for 1024 tokens, since the longest token has 12 characters


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG], "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/embeddings", {"input": LONG}),
        ("/v1/rerank", {"query": "x", "documents": [LONG]}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_text_that_cannot_fit_is_not_tokenized(path: str, body: dict[str, Any]) -> None:
    llm, lengths = FakeLLM(), []
    encode = llm.input_processor.encode

    def recorded(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    llm.input_processor.encode = recorded  # type: ignore[method-assign]
    with running(llm) as server:
        error = server.post(path, **body).json()["error"]
        assert "the prompt is too long" in error["message"]
        assert "context_length_exceeded" in (error.get("code"), *error.get("details", {}).values())
        assert max(lengths, default=0) < len(LONG)
        assert server.post("/tokenize", prompt="x" * 2000).json()["count"] == 2000


def test_samples_count_as_requests_that_wait() -> None:
    """Neither one request nor all requests may have more samples than can run and wait."""
    llm = FakeLLM(is_silent=True, config=EngineConfig("fake", max_num_seqs=2))
    with running(llm, max_queued_requests=3) as server:
        for body in ({"prompt": ["x"] * 3, "n": 2}, {"prompt": "x", "n": 6}):
            refused = server.post("/v1/completions", **body)
            assert refused.status_code == 400
            assert "6 sequences" in refused.json()["error"]["message"]
        assert server.post("/v1/embeddings", input=["x"] * 6).status_code == 400
        url, body = f"{server.url}/v1/completions", {"prompt": "x", "n": 5}
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body)))
        thread.start()
        wait_until(lambda: llm.num_requests == 1)
        assert server.post("/v1/completions", prompt="x").status_code == 429
        llm.is_silent = False
        thread.join(60)
        assert answers[0].status_code == 200
        assert server.post("/v1/completions", prompt="x").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "stream": True}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/responses", {"input": "x", "top_logprobs": 2}),
        ("/v1/responses", {"input": "x", "top_logprobs": 2, "stream": True}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_large_answers_are_encoded_off_the_event_loop(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts are computed there too: logprobs of many tokens take longer than encoding."""
    threads: list[str] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments, **options)

        return call

    for where, name in (
        (completions, "_logprobs_by_text"),
        (logprobs, "_logprob"),
        (embeddings, "_encoded"),
    ):
        monkeypatch.setattr(where, name, recorded(getattr(where, name)))
    if "chat" in path:
        body = body | {"messages": [{"role": "user", "content": "x"}]}
    length = {"/v1/responses": "max_output_tokens", "/v1/embeddings": ""}.get(path, "max_tokens")
    asked = body | ({length: 5} if length else {})
    assert server.http.post(path, json=asked).status_code == 200
    assert threads
    assert {name.partition("_")[0] for name in threads} <= {"asyncio", "uvloop"}  # executor threads


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), 60)


def head(path: str, length: int, headers: str = "", version: str = "HTTP/1.1") -> bytes:
    """Return the head of a request with a JSON body of `length` bytes."""
    usual = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"POST {path} {version}\r\n{usual}{headers}\r\n".encode()


def exchanged(server: Running, body: bytes, headers: str = "", version: str = "HTTP/1.1") -> bytes:
    """Send raw bytes to the server and return everything that it sends back."""
    with connect(server) as connection:
        connection.sendall(head("/v1/completions", len(body), headers, version) + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_clients_may_offer_another_protocol() -> None:
    """Java's clients offer HTTP/2; the offer is ignored, and the body is read."""
    with running(FakeLLM()) as server:
        headers = "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
        headers += "HTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
        answer = exchanged(server, b'{"prompt": "x"}', headers)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"text":"Hello!"' in answer


def test_clients_of_http_1_0_get_no_chunks() -> None:
    with running(FakeLLM()) as server:
        answer = exchanged(server, b'{"prompt": "x", "stream": true}', version="HTTP/1.0")
        first, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in first
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


def test_a_full_queue_says_when_to_come_back() -> None:
    llm = FakeLLM()
    with running(llm, max_queued_requests=3) as server:
        for stats in (CoreStats(num_waiting=3), CoreStats(num_waiting=2)):
            llm.stats = stats
            if stats.num_waiting < 3:
                assert server.openai.completions.create(model="tiny", prompt="x").choices
                continue
            with pytest.raises(RateLimitError) as caught:
                server.openai.completions.create(model="tiny", prompt="x")
            assert caught.value.response.headers["retry-after"] == "1"
        llm.num_requests = llm.config.max_num_seqs + 3
        assert server.post("/v1/embeddings", input="x").status_code == 429


def test_requests_that_come_together_do_not_pass_the_limit() -> None:
    llm = FakeLLM("Hello!" * 20, pause=0.05, config=EngineConfig("fake", max_num_seqs=2))

    async def ask_all(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"prompt": "x", "stream": True}
            asked = [client.post("/v1/completions", json=body) for _ in range(12)]
            return sorted(answer.status_code for answer in await asyncio.gather(*asked))

    with running(llm, max_queued_requests=3) as server:
        assert asyncio.run(ask_all(server.url)) == [200] * 5 + [429] * 7


def test_answers_that_take_too_long_end() -> None:
    llm = FakeLLM(is_silent=True)
    with running(llm, request_timeout=0.1) as server:
        for stream in (False, True):
            response = server.post("/v1/completions", prompt="x", stream=stream)
            assert response.status_code == 504
            assert response.json()["error"]["type"] == "timeout_error"
        assert llm.num_aborted == 2


def test_a_dead_engine_is_known_everywhere() -> None:
    llm = FakeLLM(error=EngineError("the core died"))
    with running(llm) as server:
        for response in (
            server.http.get("/health"),
            server.http.get("/ping"),
            server.post("/v1/completions", prompt="x"),
            server.post("/v1/completions", prompt="x", stream=True),
            server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the core died"


def test_clients_are_not_shown_tracebacks() -> None:
    """Tracebacks are only logged: /health needs no key, and they contain paths of the server."""
    error = EngineError("the core died\nTraceback (most recent call last):\n  File ...")
    for llm in (FakeLLM(error=error), FakeLLM(others=[FakeLLM(error=error)])):
        with running(llm) as server:
            health = server.http.get("/health")
            answer = server.post("/v1/completions", prompt="x")
            assert "the core died" in health.text
            assert "Traceback" not in health.text + answer.text
            assert health.status_code == answer.status_code == (503 if llm.error else 200)


def test_request_ids_come_back(guarded: Running) -> None:
    for given, is_kept in (("abc-123", True), ("x" * 129, False), ("a b", False)):
        answer = guarded.http.get("/health", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) == is_kept
    refused = guarded.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert refused.headers["x-request-id"] == refused.headers["request-id"] == "mine"


def test_a_path_cannot_write_lines_of_the_log(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    guarded.http.get("/v1/%0Aforged%1B%5B31m")
    # The log line follows the response, and perhaps the line of an earlier test's request.
    wait_until(lambda: " GET /v1/%0Aforged%1B%5B31m: 401 after " in caplog.text)


def test_other_sites_are_not_let_in(guarded: Running) -> None:
    headers = {"origin": "https://else.where", "x-api-key": "first"}
    response = guarded.http.get("/v1/models", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_large_bodies_are_encoded_and_sent_in_pieces() -> None:
    """So other requests are served in between: a thread that encodes holds the GIL for a piece."""
    text = "é\ud800" * 100
    events = [{"choices": [partial(dict, number=i, text=[partial(str, text)])]} for i in range(9)]
    plain = [{"choices": [{"number": i, "text": [text.replace("\ud800", "?")]}]} for i in range(9)]
    pieces = list(json_pieces(events))
    assert json.loads(b"".join(pieces)) == plain
    assert max(map(len, pieces)) <= len(to_json(text))
    sent: list[Any] = []

    async def body() -> dict[str, Any]:
        return {"all": [partial(str, "x" * 1000)] * 5000}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(WholeResponse(body(), None)({"type": "http"}, asyncio.Event().wait, send))
    bodies = [message["body"] for message in sent[1:]]
    assert json.loads(b"".join(bodies)) == {"all": ["x" * 1000] * 5000}
    assert max(map(len, bodies)) < 2 * PIECE_BYTES < 5_000_000
    assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % sum(map(len, bodies))


def test_prompts_of_one_request_share_its_id() -> None:
    """The engine takes turns between requests."""
    with running(FakeLLM()) as server:
        for prompts in (["a", "b", "c"], "d"):
            assert server.post("/v1/completions", prompt=prompts).status_code == 200
        first, second, third, other = server.llm.request_ids
        assert first == second == third != other


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_aborted(server: Running, stream: bool) -> None:
    """Its sequences end and its blocks are freed, whatever kind of response it requested."""
    body = {"prompt": "x", "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": stream}
    before, num_whole = server.llm.stats.num_free_blocks, num_ended(server, "length")
    num_aborted = num_ended(server, "abort")
    if stream:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
    else:
        content = json.dumps(body).encode()
        with connect(server) as connection:
            connection.sendall(head("/v1/completions", len(content)) + content)
            wait_until(lambda: server.llm.num_requests > 0)
    wait_until(lambda: server.llm.num_requests == 0)
    server.post("/v1/completions", prompt="y", max_tokens=1)
    wait_until(lambda: server.llm.stats.num_running == 0)
    assert server.llm.stats.num_free_blocks >= before
    assert num_ended(server, "length") == num_whole + 1  # not the aborted ones
    assert num_ended(server, "abort") == num_aborted + 4


def num_ended(server: Running, reason: str) -> int:
    """Return the count of a finish reason, which exists before the first such request."""
    pattern = rf'^vllm:request_success_total{{finished_reason="{reason}".* (\d+)'
    found = re.search(pattern, server.http.get("/metrics").text, re.M)
    assert found is not None
    return int(found[1])


def test_requests_that_an_engine_fails_are_counted() -> None:
    with running(FakeLLM(failure=EngineError("the core died"))) as server:
        for reason in ("stop", "length", "abort", "error"):
            assert num_ended(server, reason) == 0
        text = server.post("/v1/completions", prompt="x", stream=True).text
        assert "the core died" in text
        assert num_ended(server, "error") == 1


def test_embeddings_are_counted_however_they_end() -> None:
    llm = FakeLLM()
    with running(llm) as server:
        assert server.post("/v1/embeddings", input=["x", "y"]).status_code == 200
        assert num_ended(server, "stop") == 2
        llm.is_silent = True
        body = b'{"input": ["x", "y", "z"]}'
        with connect(server) as connection:
            connection.sendall(head("/v1/embeddings", len(body)) + body)
            wait_until(lambda: llm.num_requests == 3)
        wait_until(lambda: num_ended(server, "abort") == 3)
        assert llm.num_requests == 0
        llm.error = EngineError("the core died")
        assert server.post("/v1/embeddings", input="x").status_code == 503
        assert (num_ended(server, "stop"), num_ended(server, "error")) == (2, 1)


def test_requests_that_never_arrive_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose responses take longer than that are not cut off."""
    monkeypatch.setattr(run, "RECEIVE_SECONDS", 0.5)
    llm = FakeLLM("Hello!" * 5, pause=0.2)
    with running(llm) as server:
        for sent in (b"", b"POST /v1/comp", head("/v1/completions", 30) + b'{"prompt":'):
            with connect(server) as connection:
                connection.sendall(sent)
                is_closed = False
                while not is_closed:  # sending a byte now and then does not help
                    connection.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        try:
                            is_closed = connection.recv(1) == b""
                        except ConnectionError:
                            is_closed = True
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b" " if sent else b"")
        for _ in range(2):  # on the same connection
            assert "[DONE]" in server.post("/v1/completions", prompt="x", stream=True).text


def test_a_lack_of_file_descriptors_is_logged_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(FakeLLM()) as server:
        loop, is_done = server.server.servers[0].get_loop(), threading.Event()
        error = OSError(errno.EMFILE, "Too many open files")
        context = {"message": "socket.accept() out of system resource", "exception": error}
        start = time.monotonic()
        for _ in range(1000):
            loop.call_soon_threadsafe(loop.call_exception_handler, context)
        loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "something else"})
        loop.call_soon_threadsafe(is_done.set)
        assert is_done.wait(60)
        lines = [record.getMessage() for record in caplog.records]
        assert lines.pop() == "something else"
        assert 1 <= len(lines) <= 1 + time.monotonic() - start
        assert set(lines) == {"cannot accept connections: [Errno 24] Too many open files"}


def test_too_many_requests_at_once_are_refused_early() -> None:
    llm = FakeLLM(is_silent=True)
    with running(llm, limit_concurrency=1) as server:
        url, body = f"{server.url}/v1/completions", {"prompt": "x"}
        thread = threading.Thread(target=lambda: httpx.post(url, json=body))
        thread.start()
        wait_until(lambda: llm.num_requests == 1)
        refused = server.post("/v1/completions", **body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert server.http.get("/health").status_code == 200
        llm.is_silent = False
        thread.join(60)
        wait_until(lambda: server.post("/v1/completions", **body).status_code == 200)


@pytest.mark.parametrize("path", ["/", "/engine/events?engine=9", "/trace?seconds=0", "/v1/models"])
def test_a_local_server_knows_its_own_names_only(path: str) -> None:
    """Another site's host name may resolve to this machine (DNS rebinding)."""
    with running(FakeLLM(), is_local=True) as server:
        for host in ("localhost", "localhost:80", "127.0.0.1:8000", "127.0.0.5", "[::1]:8000"):
            assert server.http.get(path, headers={"host": host}).status_code != 403, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", ""):
            refused = server.http.get(path, headers={"host": host})
            assert refused.status_code == 403, host
            assert refused.json()["error"]["type"] == "permission_error"
        assert server.http.get("/health", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/engine/pause", "/v1/completions", "/tokenize"])
def test_pages_of_other_sites_change_nothing(path: str) -> None:
    """Browsers send a POST without a preflight if it has no body, or one of a simple type."""
    foreign, own = {"origin": "https://else.where"}, "http://localhost:8000"
    cross = {"sec-fetch-site": "cross-site"}
    refused = (foreign, cross, cross | {"origin": own}, {"origin": "http://localhost:1"})
    refused += ({"origin": "null"}, {"origin": "http://["}, {"sec-fetch-site": "same-site"})
    with running(FakeLLM(), allow_pause=True, allowed_origins=("https://a.example",)) as server:
        for headers in refused:
            response = server.http.post(path, headers=headers | {"host": "localhost:8000"})
            assert response.status_code == 403, headers
            assert "--allowed-origins" in response.json()["error"]["message"]
        assert server.llm.actions == []
        # Behind a proxy that replaces the Host header, only the browser knows that it is one site.
        accepted = ({}, {"origin": own}, foreign | {"sec-fetch-site": "same-origin"})
        for headers in (*accepted, cross | {"origin": "https://a.example"}):
            response = server.http.post(path, headers=headers | {"host": "localhost:8000"})
            assert response.status_code != 403, headers
        assert server.http.get("/", headers=cross).status_code == 200  # a link on another site


def test_log_lines_name_the_client_and_leave_files_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    with running(FakeLLM()) as server:
        assert server.http.get("/").status_code == 200
        assert server.http.get("/page/main.js").status_code == 200
        assert server.http.get("/version").status_code == 200
        wait_until(lambda: "GET /version" in caplog.text)
    (line,) = [each for each in caplog.messages if " GET " in each]
    assert re.fullmatch(r"127\.0\.0\.1:\d+ \S+ GET /version: 200 after \d\.\d{3} s", line)


def test_throughput_is_logged_while_an_engine_is_busy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    llm = FakeLLM()
    log = run.ThroughputLog(llm, 100.0)
    busy = CoreStats(3, 1, 100, 75, 0, 50, 25, num_prefill_tokens=200, num_decode_tokens=1000)
    idle, restarted = replace(busy, num_running=0, num_waiting=0), CoreStats(num_prefill_tokens=10)
    times = (109.0, 110.0, 120.0, 130.0)
    for llm.stats, now in zip((busy, busy, idle, restarted), times, strict=True):
        log.tick(now)
    assert caplog.messages == [
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 100.0 "
        "tokens/s, Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, "
        "Prefix cache hit rate: 50.0%",
        "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 0.0 "
        "tokens/s, Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, "
        "Prefix cache hit rate: 0.0%",
    ]


def test_pages_of_allowed_origins_are_let_in() -> None:
    options: dict[str, Any] = {"allowed_origins": ("https://a.example",), "api_key": ("secret",)}
    with running(FakeLLM(), **options) as server:
        for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization,content-type"
            preflight = server.http.options("/v1/completions", headers=asked)
            assert (preflight.status_code == 200) == is_allowed
            headers = {"origin": origin, "x-api-key": "secret"}
            response = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 200
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (origin if is_allowed else None)


def test_there_is_a_schema_but_no_page_that_loads_scripts_from_elsewhere(server: Running) -> None:
    assert server.http.get("/openapi.json").status_code == 200
    for path in ("/docs", "/redoc"):
        assert server.http.get(path).status_code == 404


def test_metrics_have_the_names_of_dashboards(server: Running) -> None:
    stream = server.openai.completions.create(
        model="tiny", prompt=[7] * 40, max_tokens=30, stream=True, extra_body={"ignore_eos": True}
    )
    list(stream)
    text = server.http.get("/metrics").text
    for name in METRICS.split():
        assert re.search(rf'^vllm:{name}{{[^}}]*model_name="tiny"[^}}]*}} \d', text, re.M), name
    assert 'request_success_total{finished_reason="length"' in text
    assert 'cache_config_info{block_size="16"' in text
    assert 'kv_cache_dtype="auto"' in text
    number = re.search(r"^vllm:inter_token_latency_seconds_count.* (\d+)", text, re.M)
    assert number is not None
    assert int(number.group(1)) >= 2  # a busy reader gets several tokens at once


def test_samples_of_a_prompt_are_timed_for_themselves() -> None:
    """The inter-token latency is measured per sample, not between the samples of a step."""
    metrics = Metrics(FakeLLM(), "", "tiny")
    tokens = 'generation_tokens_total{model_name="tiny"} '

    async def answer() -> AsyncGenerator[StreamPiece, None]:
        for number in range(3):
            for sample in range(2):
                yield StreamPiece(0, "x", [7], None, sample=sample)
                assert f"{tokens}{2 * number + sample + 1}.0" in metrics.text().decode()
            await asyncio.sleep(0.2)

    async def read() -> None:
        async for _ in metrics.observed(answer()):
            pass

    asyncio.run(read())
    text = metrics.text().decode()
    assert 'inter_token_latency_seconds_count{model_name="tiny"} 4.0' in text
    assert 'inter_token_latency_seconds_bucket{le="0.1",model_name="tiny"} 0.0' in text


@pytest.mark.parametrize("path", ["/llm", ""])
def test_a_proxy_may_hand_on_its_own_part_of_paths_or_not(path: str) -> None:
    with running(FakeLLM(), root_path="/llm", api_key=("secret",)) as server:
        assert server.http.get(f"{path}/health").status_code == 200
        assert server.http.get(f"{path}/").status_code == 200
        assert server.http.get(f"{path}/v1/models").status_code == 401
        known = {"x-api-key": "secret"}
        assert server.http.get(f"{path}/v1/models", headers=known).status_code == 200
        wrong = server.http.post(f"{path}/v1/messages", json={}, headers=known).json()
        assert wrong["error"]["message"].startswith("messages: ")
        assert wrong["type"] == "error"
        servers = server.http.get(f"{path}/openapi.json", headers=known).json()["servers"]
        assert servers == [{"url": "/llm"}]
        redirected = server.http.get(f"{path}/health/", headers=known)
        assert redirected.status_code == 307
        assert redirected.headers["location"] == f"{server.url}/llm/health"


@pytest.mark.parametrize("root_path", ["/llm", "/page", "/page/llm"])
def test_a_root_path_opens_nothing(root_path: str) -> None:
    """A root path equal to a path of the page, which needs no key, does not bypass the key."""
    with running(FakeLLM(), root_path=root_path, api_key=("secret",)) as server:
        for path in (root_path, root_path * 2, root_path * 3, root_path + "/page"):
            response = server.http.get(f"{path}/v1/models")
            assert response.status_code in (401, 404)
            assert "tiny" not in response.text
        assert server.http.get(f"{root_path}/page/main.js").status_code == 200


def test_keys_are_compared_as_bytes() -> None:
    with running(FakeLLM(), api_key=("schlüssel",)) as server:
        for encoding, status in (("utf-8", 200), ("latin-1", 401)):
            headers = [(b"authorization", "Bearer schlüssel".encode(encoding))]
            assert server.http.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_tells_those_who_still_wait(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting clients get an error in the format of their API, without a traceback in the log."""
    llm = FakeLLM(text="Hello!" * 1000, pause=0.05, is_silent=not stream)
    key = "messages" if "messages" in path else "prompt"
    asked = [{"role": "user", "content": "x"}] if key == "messages" else "x"
    body = {key: asked, "max_tokens": 900, "stream": stream}
    answers: list[httpx.Response] = []
    with running(llm, shutdown_timeout=0.3) as server:
        url = server.url + path
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body)))
        thread.start()
        wait_until(lambda: bool(llm.asked))
    thread.join(120)
    assert answers[0].status_code == (200 if stream else 503)
    assert answers[0].text.count("the server is shutting down") == 1
    assert ('"type":"error"' in answers[0].text) == (key == "messages")
    assert answers[0].text.endswith("data: [DONE]\n\n") == (stream and key == "prompt")
    assert not caplog.records


def test_a_server_that_ends_waits_for_nobody_who_stops_halfway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits neither for the rest of a body nor for a slow reader; no traceback is logged."""
    monkeypatch.setattr(run, "LAST_SECONDS", 0.5)
    monkeypatch.setattr(run, "CANCEL_SECONDS", 60)
    llm = FakeLLM(text="Hello!" * 20_000)
    with contextlib.ExitStack() as stack:
        with running(llm, shutdown_timeout=0.1) as server:
            connections = [stack.enter_context(socket.socket()) for _ in range(2)]
            for connection, rest in zip(connections, (b"", b'"prompt": "x"}'), strict=True):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
                connection.sendall(head("/v1/completions", 30) + b'{"stream": true,' + rest)
            wait_until(lambda: bool(llm.asked))
            time.sleep(0.5)
            start = time.monotonic()
        assert time.monotonic() - start < 50
    assert not caplog.records


def test_several_engines_are_told_apart() -> None:
    """If one of two engines is lost, /health names it, and the other one serves requests."""
    lost = FakeLLM(error=EngineError("it died"), stats=CoreStats(num_cache_hits=3))
    with running(FakeLLM(stats=CoreStats(num_running=2), others=[lost])) as server:
        text = server.http.get("/metrics").text
        for name, values in {
            "num_requests_running": (2, 0),
            "prefix_cache_hits_total": (0, 3),
            "engine_up": (1, 0),
        }.items():
            for number, value in enumerate(values):
                labels = f'{{engine="{number}",model_name="tiny"}}'
                assert f"vllm:{name}{labels} {value}.0\n" in text
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (200, {"lost_engines": {"1": "it died"}})
        assert server.post("/v1/completions", prompt="x").status_code == 200
        assert server.http.get("/engine/events?engine=1").status_code == 503
        assert server.http.get("/engine/events?engine=2").status_code == 400
        events = server.http.get("/trace?seconds=0.1").json()["traceEvents"]
        names = [f"engine {i}: {part}" for i in (0, 1) for part in ("host", "device", "requests")]
        assert [event["args"]["name"] for event in events] == names
        assert [event["pid"] for event in events] == [1, 2, 3, 4, 5, 6]


def test_metrics_may_be_renamed() -> None:
    with running(FakeLLM(), metrics_prefix="ours_") as server:
        assert "ours_num_requests_running{" in server.http.get("/metrics").text


def test_models_are_listed_and_described(server: Running) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny", "org/tiny"]
    assert server.openai.models.retrieve("org/tiny").to_dict()["max_model_len"] == 1024
    assert server.http.get("/v1/models/other").status_code == 404
    listing = server.http.get("/v1/models").json()  # Anthropic's client reads these
    assert (listing["has_more"], listing["first_id"], listing["last_id"]) == (
        False,
        "tiny",
        "org/tiny",
    )
    described = listing["data"][1]
    assert (described["type"], described["display_name"]) == ("model", "org/tiny")
    assert datetime.fromisoformat(described["created_at"]).timestamp() == described["created"]
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/load").json() == {"server_load": 0}
    assert "/v1/chat/completions" in server.http.get("/openapi.json").json()["paths"]


def test_texts_become_tokens_and_back(server: Running) -> None:
    ids = server.post("/tokenize", prompt="héllo", return_token_strs=True).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"]) == 6
    assert server.post("/detokenize", tokens=ids["tokens"]).json() == {"prompt": "héllo"}
    messages = [{"role": "user", "content": "x"}]
    chat = server.post("/tokenize", messages=messages).json()["tokens"]
    text = server.post("/detokenize", tokens=chat).json()["prompt"]
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_of_embeddings_are_counted(server: Running) -> None:
    def count() -> float:
        text = server.http.get("/metrics").text
        found = re.search(r"^vllm:prompt_tokens_total.* (\S+)", text, re.M)
        assert found is not None
        return float(found[1])

    before = count()
    assert server.post("/v1/embeddings", input=["one", "two"]).status_code == 200
    assert count() == before + 6


def test_embeddings_in_both_encodings(server: Running) -> None:
    create = server.openai.embeddings.create
    floats = create(model="tiny", input=["one", "two"], encoding_format="float")
    vectors = [item.embedding for item in floats.data]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert vectors[0] != vectors[1]
    assert floats.usage.prompt_tokens == 6
    raw = server.post("/v1/embeddings", input=["one", "two"], encoding_format="base64").json()
    decoded = [base64.b64decode(item["embedding"]) for item in raw["data"]]
    assert [struct.unpack(f"<{len(vectors[0])}f", each) for each in decoded] == [
        pytest.approx(vector) for vector in vectors
    ]
