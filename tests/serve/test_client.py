"""The client for OpenAI servers, with our own server and with incomplete responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from nanovllm import SamplingParams
from nanovllm.cli.bench_serve import measure
from nanovllm.errors import ConfigError, EngineError, PromptTooLongError, RequestError
from nanovllm.serve.client import HttpLLM, OpenAIClient
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(text="Hello, you!"), api_key=("secret",)) as server:
        yield server


async def answer(client: OpenAIClient, prompt: str = "Hi", **fields: object) -> str:
    text, messages = "", [{"role": "user", "content": prompt}]
    async with contextlib.aclosing(client.stream(messages, **fields)) as events:
        async for event in events:
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_answers_come_whole_from_either_url(fake: Running, path: str) -> None:
    client = OpenAIClient(fake.url + path, "secret")
    assert asyncio.run(client.model()) == "tiny"
    assert asyncio.run(answer(client)) == "Hello, you!"
    assert asyncio.run(client.get("/version"))["version"]


def test_what_the_server_refuses_is_said(fake: Running) -> None:
    with pytest.raises(RequestError, match="401: a valid API key is required"):
        asyncio.run(OpenAIClient(fake.url).model())
    with pytest.raises(RequestError, match=r"404: .*the model 'other' does not exist"):
        asyncio.run(answer(OpenAIClient(fake.url, "secret"), model="other"))
    with pytest.raises(PromptTooLongError, match="400: the prompt is too long"):
        asyncio.run(answer(OpenAIClient(fake.url, "secret"), "x" * 2000))
    with pytest.raises(ConfigError, match="the URL must look like"):
        asyncio.run(OpenAIClient("localhost:8000").model())


def test_an_error_in_a_stream_is_raised() -> None:
    llm = FakeLLM(failure=EngineError("the core died"))
    with running(llm) as server, pytest.raises(RequestError, match="the core died"):
        asyncio.run(answer(OpenAIClient(server.url)))


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: Chunked\r\n\r\n"


def said(text: str, **fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}, **fields}]}).encode()


def chunk(*lines: bytes) -> bytes:
    body = b"\n\n".join([*lines, b""])
    return b"%x\r\n%s\r\n" % (len(body), body)


@contextlib.contextmanager
def sending(sent: bytes) -> Iterator[OpenAIClient]:
    """Yield a client of a server that responds to its only request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            request = connection.recv(65536)
            head = request.lower()
            length = (
                int(head.split(b"content-length: ")[1].split(b"\r")[0])
                if b"content-length" in head
                else 0
            )
            num_left = length - len(request.partition(b"\r\n\r\n")[2])
            while num_left > 0:
                num_left -= len(connection.recv(65536))
            connection.sendall(sent)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield OpenAIClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "invalid or incomplete response"),
        (HEAD + b"content-length: many\r\n\r\n", "invalid or incomplete response"),
        (HEAD + b"content-length: 7\r\n\r\n<html/>", "returned invalid JSON"),
        (HEAD + b"content-length: 2\r\n\r\n[]", "does not list its models"),
        (HEAD + b'content-length: 12\r\n\r\n{"data": []}', "does not list its models"),
    ],
)
def test_servers_that_are_no_servers_of_models(sent: bytes, message: str) -> None:
    with sending(sent) as client, pytest.raises(EngineError, match=message):
        asyncio.run(client.model())


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (CHUNKED + chunk(said("Hel")), "invalid or incomplete response"),
        (CHUNKED + chunk(said("Hel")) + b"?\r\n", "invalid or incomplete response"),
        (CHUNKED + chunk(said("Hel")) + b"0\r\n\r\n", "without a finish_reason"),
        (HEAD + b"\r\n" + said("Hel") + b"\n\n", "without a finish_reason"),
        (HEAD + b"\r\n<html></html>", "without a finish_reason"),
        (CHUNKED + chunk(b"data: {oops"), "not in OpenAI's format: {oops"),
        (CHUNKED + chunk(b"data: [1]"), r"not in OpenAI's format: \[1\]"),
        (CHUNKED + chunk(b'data: {"choices": [1]}'), "not in OpenAI's format"),
    ],
)
def test_half_a_stream_is_no_answer(sent: bytes, message: str) -> None:
    with sending(sent) as client, pytest.raises(EngineError, match=message):
        asyncio.run(answer(client))


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + chunk(said("Hello")) + chunk(b"data: [DONE]") + b"0\r\n\r\n",
        HEAD + b"\r\n" + said("Hello", finish_reason="stop") + b"\n\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + HEAD
        + b"\r\n"
        + chunk(said("Hello"), b"data: [DONE]"),
    ],
)
def test_an_answer_is_complete_once_that_is_said(sent: bytes) -> None:
    with sending(sent) as client:
        assert asyncio.run(answer(client)) == "Hello"


def test_a_server_that_is_silent_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = OpenAIClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineError, match="ReadTimeout"):
            asyncio.run(client.get("models", 0.1))


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://[::1"])
def test_a_url_that_is_none_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL must look like"):
        asyncio.run(OpenAIClient(url).model())


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "invalid or incomplete response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{", "invalid or incomplete response"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n20\r\n{",
            "invalid or incomplete response",
        ),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(sent: bytes, message: str) -> None:
    with sending(sent) as client, pytest.raises(EngineError, match=message):
        asyncio.run(client.model())
    with pytest.raises(EngineError, match="cannot connect"):
        asyncio.run(client.model())


NULLS = CHUNKED + chunk(
    b'data: {"choices": null}',
    b'data: {"choices": [{"delta": null}]}',
    said("Hello", finish_reason="stop"),
    b'data: {"usage": {"prompt_tokens": null, "completion_tokens": null}}',
    b"data: [DONE]",
)


def test_what_a_server_leaves_out_may_be_null() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with sending(NULLS) as client:
        pieces = list(HttpLLM(client, "tiny").stream([messages], SamplingParams()))
        assert pieces[-1].output is not None
        assert pieces[-1].output.text == "Hello"
    with sending(NULLS) as client:
        measured = asyncio.run(measure(client, messages, {"model": "tiny"}, 0.0))
        assert (measured.error, measured.num_tokens) == (None, 1)
