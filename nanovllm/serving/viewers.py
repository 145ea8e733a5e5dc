"""Subscribers to the state of an engine: each gets the newest snapshot that it has not read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from nanovllm.errors import NanovllmError
from nanovllm.serving.core_records import EngineState

MAX_UNREAD = 4096  # steps and ended sequences


class Viewers:
    """`watch` makes the core begin or stop sending snapshots; any thread may push."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self._viewers: dict[Viewer, None] = {}
        self._lock = threading.Lock()

    async def look(self) -> AsyncGenerator[EngineState, None]:
        """Yield snapshots until they are closed; raise what ended the engine."""
        viewer = Viewer()
        with self._lock:
            self._viewers[viewer] = None
        try:
            self._watch(True)
            while (state := await viewer.next()) is not None:
                yield state
        finally:
            with self._lock:
                del self._viewers[viewer]
                if not self._viewers:
                    self._watch(False)

    def push(self, state: EngineState) -> None:
        self._call_all(lambda viewer: viewer.push(state))

    def fail(self, error: NanovllmError) -> None:
        self._call_all(lambda viewer: viewer.end(error))

    def close(self) -> None:
        """End all subscriptions, without an error."""
        self._call_all(lambda viewer: viewer.end(None))

    def _call_all(self, call: Callable[[Viewer], None]) -> None:
        with self._lock:
            viewers = list(self._viewers)
        for viewer in viewers:
            try:
                viewer.loop.call_soon_threadsafe(call, viewer)
            except RuntimeError:
                if not viewer.loop.is_closed():
                    raise


class Viewer:
    """What one subscriber has not read; used in its event loop alone."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._unread: EngineState | None = None
        self._is_over = False
        self._error: NanovllmError | None = None
        self._has_news = asyncio.Event()

    async def next(self) -> EngineState | None:
        await self._has_news.wait()
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self._is_over:
            return None
        self._has_news.clear()
        state, self._unread = self._unread, None
        return state

    def push(self, state: EngineState) -> None:
        """Replace what is unread, and keep its steps and ended sequences."""
        if self._unread is not None:
            steps = [*self._unread.steps, *state.steps][-MAX_UNREAD:]
            ended = [*self._unread.ended, *state.ended][-MAX_UNREAD:]
            state = replace(state, steps=steps, ended=ended)
        self._unread = state
        self._has_news.set()

    def end(self, error: NanovllmError | None) -> None:
        self._is_over, self._error = True, error
        self._has_news.set()
