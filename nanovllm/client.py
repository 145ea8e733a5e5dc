"""A client of OpenAI's API, for whichever server speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nanovllm.errors import ConfigError, EngineError, RequestError

MAX_LINE = 2**20


@dataclass(frozen=True, slots=True)
class OpenAIClient:
    """Of the server at a URL as in http://127.0.0.1:8000, or with its path, as in .../v1."""

    url: str
    api_key: str | None = None

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        """Return what a path answers, which is JSON; one outside of /v1 begins with a slash."""
        return json.loads(await asyncio.wait_for(self._whole(path), timeout))

    async def model(self) -> str:
        """The first model that the server has."""
        return str((await self.get("models"))["data"][0]["id"])

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of an answer as they come."""
        packed = json.dumps(body | {"stream": True}).encode()
        rest = b""
        async with contextlib.aclosing(self._pieces("POST", path, packed)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield _checked(json.loads(data))

    async def _whole(self, path: str) -> bytes:
        async with contextlib.aclosing(self._pieces("GET", path)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def _pieces(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"a URL begins with http:// or https://, unlike {self.url!r}")
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
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
    status_line = await reader.readline()
    if not status_line:
        raise ConnectionResetError("it closed the connection")
    status = int(status_line.split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = _body(reader, headers)
    if status == 200:
        async for piece in body:
            yield piece
        return
    text = b"".join([piece async for piece in body]).decode(errors="replace")
    raise RequestError(f"the server answered {status}: {_message(text)}")


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(2**16):
            yield piece


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("error"):
        raise RequestError(f"the server ended its answer: {_message(json.dumps(event))}")
    return event


def _message(text: str) -> str:
    """The message of an error, as most servers write it; else all they said."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return text.strip() or "nothing more"
