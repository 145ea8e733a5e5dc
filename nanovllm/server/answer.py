"""How answers are sent: as one body or as events, while the client is there to read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import anyio
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.errors import NanovllmError
from nanovllm.server.errors import ApiError, as_api_error, to_json

Event = dict[str, Any]


class Answer(Protocol):
    """An answer in the form of one API."""

    def events(self) -> AsyncGenerator[Event, None]:
        """Yield what it is made of."""

    def whole(self, events: list[Event]) -> Event:
        """Make one body of all events."""


class EventStream(Protocol):
    """What is sent event by event."""

    def events(self) -> AsyncGenerator[Event, None]:
        """Yield what it is made of."""

    def encode(self, event: Event) -> bytes:
        """Write an event as a stream has it."""

    def error(self, error: ApiError) -> list[Event]:
        """End a stream that has begun."""

    end: bytes  # of every stream
    is_large: bool  # events may take long to encode: not on the event loop


class StreamedAnswer(Answer, EventStream, Protocol):
    """One that may be sent either way."""


class WholeResponse(Response):
    """Sends an answer when it is there; whatever is wrong with it raises."""

    def __init__(self, answer: Answer, timeout: float | None) -> None:
        super().__init__(media_type="application/json")
        self._answer, self._timeout = answer, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            with anyio.fail_after(self._timeout):
                async with contextlib.aclosing(self._answer.events()) as events:
                    collected = [event async for event in events]
            # A body may have megabytes, which take seconds to encode.
            body = await asyncio.to_thread(lambda: to_json(self._answer.whole(collected)))
            await Response(body, media_type=self.media_type)(scope, receive, send)


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
                            await self._begin(send)
                            has_begun = True
                        if answer.is_large:
                            body = await asyncio.to_thread(answer.encode, event)
                        else:
                            body = answer.encode(event)
                        await _send_body(send, body)
        except (NanovllmError, ApiError, TimeoutError) as error:
            if not has_begun:
                raise
            for event in answer.error(as_api_error(error)):
                await _send_body(send, answer.encode(event))
        await _send_body(send, answer.end, is_last=True)

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


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
