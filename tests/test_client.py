"""The client for OpenAI servers: against our own, and against answers that break off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError, EngineError, RequestError
from tests.server.fake_llm import FakeLLM
from tests.server.running import Running, running


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM(text="Hello, you!"), api_keys=("secret",)) as server:
        yield server


async def answer(client: OpenAIClient, **fields: object) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    text = ""
    async with contextlib.aclosing(client.stream("chat/completions", body)) as events:
        async for event in events:
            text += event["choices"][0]["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_answers_come_whole_from_either_url(fake: Running, path: str) -> None:
    client = OpenAIClient(fake.url + path, "secret")
    assert asyncio.run(client.model()) == "tiny"
    assert asyncio.run(answer(client)) == "Hello, you!"
    assert asyncio.run(client.get("/version"))["version"]


def test_what_the_server_refuses_is_said(fake: Running) -> None:
    with pytest.raises(RequestError, match="401: a valid API key is needed"):
        asyncio.run(OpenAIClient(fake.url).model())
    with pytest.raises(RequestError, match=r"404: .*the model 'other' does not exist"):
        asyncio.run(answer(OpenAIClient(fake.url, "secret"), model="other"))
    with pytest.raises(ConfigError, match="begins with http"):
        asyncio.run(OpenAIClient("localhost:8000").model())


def test_an_error_in_a_stream_is_raised() -> None:
    llm = FakeLLM(failure=EngineError("the core died"))
    with running(llm) as server, pytest.raises(RequestError, match="the core died"):
        asyncio.run(answer(OpenAIClient(server.url)))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{", "broke off"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n20\r\n{", "broke off"),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(sent: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(sent)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        client = OpenAIClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineError, match=message):
            asyncio.run(client.model())
        thread.join()
        url = client.url
    with pytest.raises(EngineError, match="no server answers"):
        asyncio.run(OpenAIClient(url).model())
