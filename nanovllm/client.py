"""A client of OpenAI's API, for whichever server speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nanovllm.errors import ConfigError, EngineError, PromptTooLongError, RequestError

MAX_LINE = 2**20


@dataclass(frozen=True, slots=True)
class OpenAIClient:
    """Of the server at a URL as in http://127.0.0.1:8000, or with its path, as in .../v1."""

    url: str
    api_key: str | None = None

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        """Return what a path answers, which is JSON; one outside of /v1 begins with a slash."""
        try:
            body = await asyncio.wait_for(self._whole(path), timeout)
        except asyncio.TimeoutError as error:
            raise EngineError(f"{self.url} gave no answer within {timeout:g} s") from error
        try:
            return json.loads(body)
        except ValueError as error:
            raise EngineError(f"{self.url} answers {path} with something else than JSON") from error

    async def model(self) -> str:
        """The first model that the server has."""
        listing = await self.get("models")
        try:
            return str(listing["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise EngineError(f"{self.url} does not say which models it has") from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of an answer as they come; raise if it ends before it is complete."""
        packed = json.dumps(body | {"stream": True}).encode()
        is_complete = False
        async with contextlib.aclosing(self._event_data(path, packed)) as sent:
            async for data in sent:
                if data == b"[DONE]":
                    return
                event = _event(data)
                is_complete |= any(choice.get("finish_reason") for choice in event["choices"])
                yield event
        if not is_complete:
            raise EngineError(f"{self.url} broke off its answer: no event says that it is complete")

    async def _event_data(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        rest = b""
        async with contextlib.aclosing(self._pieces("POST", path, body)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line.removeprefix(b"data:").strip()

    async def _whole(self, path: str) -> bytes:
        async with contextlib.aclosing(self._pieces("GET", path)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def _pieces(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        try:
            parts = urlsplit(self.url)
            given_port = parts.port
        except ValueError as error:
            raise ConfigError(f"{self.url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"a URL begins with http:// or https://, unlike {self.url!r}")
        is_tls = parts.scheme == "https"
        port = given_port or (443 if is_tls else 80)
        try:
            reader, writer = await asyncio.open_connection(
                parts.hostname, port, ssl=is_tls or None, limit=MAX_LINE
            )
        except OSError as error:
            raise EngineError(f"no server answers at {self.url}: {error}") from error
        try:
            writer.write(self._head(method, _target(parts.path, path), parts.netloc, len(body)))
            writer.write(body)
            async for piece in _answer(reader):
                yield piece
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineError(f"{self.url} broke off its answer: {error}") from error
        finally:
            writer.close()

    def _head(self, method: str, target: str, host: str, num_bytes: int) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


def _target(base: str, path: str) -> str:
    """Where a path is: beside the API if it begins with a slash, else within."""
    root = base.rstrip("/").removesuffix("/v1")
    return root + (path if path.startswith("/") else f"/v1/{path}")


async def _answer(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the body; raise what the server says instead."""
    status, headers = await _head(reader)
    while status < 200:  # more is to come
        status, headers = await _head(reader)
    body = _body(reader, headers)
    if status == 200:
        async for piece in body:
            yield piece
        return
    text = b"".join([piece async for piece in body]).decode(errors="replace")
    kind = PromptTooLongError if _code(text) == "context_length_exceeded" else RequestError
    raise kind(f"the server answered {status}: {_message(text)}")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await _line(reader)).split()
    status = _number(words[1] if len(words) > 1 else b"")
    headers = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := _number((await _line(reader)).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(_number(headers["content-length"].encode()))
    else:
        while piece := await reader.read(2**16):
            yield piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise ConnectionError("a line of it is too long") from error
    if not line.endswith(b"\n"):
        raise ConnectionResetError("it closed the connection")
    return line.strip()


def _number(text: bytes, base: int = 10) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise ConnectionError("it is not in the form of HTTP")
    return number


def _event(data: bytes) -> dict[str, Any]:
    """Read an event, which has a list of choices; raise the error that it may be instead."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if isinstance(event, dict):
        if event.get("error"):
            raise RequestError(f"the server ended its answer: {_message(json.dumps(event))}")
        choices = event.get("choices") or []
        if isinstance(choices, list) and all(isinstance(each, dict) for each in choices):
            return event | {"choices": choices}
    text = data[:200].decode(errors="replace")
    raise EngineError(f"the server sent what is no event of OpenAI's API: {text}")


def _code(text: str) -> object:
    """The code of an error in OpenAI's format; None if there is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return json.loads(text)["error"]["code"]
    return None


def _message(text: str) -> str:
    """The message of an error, as most servers write it; else all they said."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return text.strip() or "nothing more"
