"""HTTP responses: a JSON body or server-sent events, canceled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import anyio
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.errors import NanovllmError
from nanovllm.serve.http_errors import json_pieces, openai_body, timeout_error, to_json

PIECE_BYTES = 1 << 20  # pieces of a large body: the event loop is blocked while it sends one
Event = dict[str, Any]


class EventStream:
    """Server-sent events in the format of one API, by default OpenAI's."""

    end = b""  # last bytes of every stream
    has_names = False  # send each event's type as the SSE event name
    is_large = False  # encode events in a thread, because encoding would block the event loop

    def events(self) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    def whole(self, events: list[Event]) -> Event:
        """Combine all events into one response body; by default, return the last event."""
        return events[-1]

    def error(self, error: NanovllmError) -> Event:
        """Return the event that reports an error in a stream that has already started."""
        return openai_body(error)

    def encode(self, event: Event) -> bytes:
        name = f"event: {event['type']}\n".encode() if self.has_names else b""
        return name + b"data: " + to_json(event) + b"\n\n"


async def whole_body(stream: EventStream) -> Event:
    async with contextlib.aclosing(stream.events()) as events:
        return stream.whole([event async for event in events])


class WholeResponse(Response):
    """A non-streaming JSON response; raises errors before anything is sent."""

    def __init__(self, body: Awaitable[Event], timeout: float | None) -> None:
        super().__init__(media_type="application/json")
        self._body, self._timeout = body, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            with anyio.fail_after(self._timeout):
                body = await self._body
            # Encoding a body of several megabytes here would block the event loop.
            pieces = await asyncio.to_thread(_json_in_pieces, body)
            self.headers["content-length"] = str(sum(map(len, pieces)))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for piece in pieces:
                await _send_body(send, piece)
            await _send_body(send, b"", is_last=True)


class StreamResponse(Response):
    """A streaming response; raises errors before the first event, sends later ones as events."""

    def __init__(self, stream: EventStream, timeout: float | None) -> None:
        super().__init__(media_type="text/event-stream")
        self._stream, self._timeout = stream, timeout
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies must not buffer events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            await self._send_events(send)

    async def _send_events(self, send: Send) -> None:
        stream, has_begun = self._stream, False
        try:
            with anyio.fail_after(self._timeout):
                async with contextlib.aclosing(stream.events()) as events:
                    async for event in events:
                        if not has_begun:
                            start = {"status": 200, "headers": self.raw_headers}
                            await send({"type": "http.response.start", **start})
                            has_begun = True
                        if stream.is_large:
                            body = await asyncio.to_thread(stream.encode, event)
                        else:
                            body = stream.encode(event)
                        await _send_body(send, body)
        except (NanovllmError, TimeoutError) as error:
            if not has_begun:
                raise
            reported = timeout_error() if isinstance(error, TimeoutError) else error
            await _send_body(send, stream.encode(stream.error(reported)))
        await _send_body(send, stream.end, is_last=True)


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncGenerator[None, None]:
    """Cancel the `with` block if the client disconnects."""

    async def watch(scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(watch(scope))
        try:
            yield
        finally:
            watcher.cancel()


def _json_in_pieces(body: Event) -> list[bytes]:
    """Return the JSON of a body, in pieces of about PIECE_BYTES."""
    pieces, piece = [], bytearray()
    for each in json_pieces(body):
        piece += each
        if len(piece) >= PIECE_BYTES:
            pieces.append(bytes(piece))
            piece.clear()
    return [*pieces, bytes(piece)]


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
