"""How answers are sent: as one body or as events, while the client is there to read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import anyio
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.errors import NanovllmError
from nanovllm.serve.http_errors import openai_body, timeout_error, to_json

Event = dict[str, Any]


class EventStream:
    """Server-sent events in the form of one API, by default OpenAI's."""

    end = b""  # of every stream
    has_names = False  # each event is sent with its type as its name
    is_large = False  # events may take long to encode: not on the event loop

    def events(self) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    def whole(self, events: list[Event]) -> Event:
        """Make one body of all events."""
        return events[-1]

    def error(self, error: NanovllmError) -> Event:
        """Return the event that ends a stream that has begun."""
        return openai_body(error)

    def encode(self, event: Event) -> bytes:
        name = f"event: {event['type']}\n".encode() if self.has_names else b""
        return name + b"data: " + to_json(event) + b"\n\n"


async def whole_body(answer: EventStream) -> Event:
    async with contextlib.aclosing(answer.events()) as events:
        return answer.whole([event async for event in events])


class WholeResponse(Response):
    """A response that is sent whole; errors raise before anything is sent."""

    def __init__(self, body: Awaitable[Event], timeout: float | None) -> None:
        super().__init__(media_type="application/json")
        self._body, self._timeout = body, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            with anyio.fail_after(self._timeout):
                body = await self._body
            # A body may have megabytes, which take seconds to encode.
            data = await asyncio.to_thread(to_json, body)
            await Response(data, media_type=self.media_type)(scope, receive, send)


class StreamResponse(Response):
    """Sends events as they come; whatever is wrong before the first one raises."""

    def __init__(self, answer: EventStream, timeout: float | None) -> None:
        super().__init__(media_type="text/event-stream")
        self._answer, self._timeout = answer, timeout
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # told to proxies: pass events on at once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            await self._stream(send)

    async def _stream(self, send: Send) -> None:
        answer, has_begun = self._answer, False
        try:
            with anyio.fail_after(self._timeout):
                async with contextlib.aclosing(answer.events()) as events:
                    async for event in events:
                        if not has_begun:
                            start = {"status": 200, "headers": self.raw_headers}
                            await send({"type": "http.response.start", **start})
                            has_begun = True
                        if answer.is_large:
                            body = await asyncio.to_thread(answer.encode, event)
                        else:
                            body = answer.encode(event)
                        await _send_body(send, body)
        except (NanovllmError, TimeoutError) as error:
            if not has_begun:
                raise
            told = timeout_error() if isinstance(error, TimeoutError) else error
            await _send_body(send, answer.encode(answer.error(told)))
        await _send_body(send, answer.end, is_last=True)


@contextlib.asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncGenerator[None, None]:
    """Run what is inside until it is done or the client hangs up."""

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


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
