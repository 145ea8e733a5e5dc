"""Asynchronous queues, one per reader, so that a slow reader does not delay the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from nanovllm.errors import NanovllmError
from nanovllm.serve.core_messages import EngineState

MAX_UNREAD = 4096  # maximum number of steps, and of ended sequences, kept for a slow reader
T = TypeVar("T")


class AsyncOutputQueue(Generic[T]):
    """A queue of items for one reader. Outside the reader's event loop, only `call` may be used."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: list[T] = []
        self._is_over = False
        self._error: NanovllmError | None = None
        self._has_items = asyncio.Event()

    async def take(self) -> list[T]:
        """Wait for items and return all; [] means the end. Raise the error given to `end`."""
        await self._has_items.wait()
        if self._error is not None:
            raise copy_error(self._error)
        if not self._is_over:
            self._has_items.clear()
        items, self.items = self.items, []
        return items

    def push(self, item: T) -> None:
        self.items.append(item)
        self._has_items.set()

    def end(self, error: NanovllmError | None = None) -> None:
        self._is_over, self._error = True, error
        self._has_items.set()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call in the reader's event loop; no effect if that loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self.loop.is_closed():
                raise


def copy_error(error: NanovllmError) -> NanovllmError:
    """Copy an error, so that each waiter raises its own instance with its own traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


class Subscribers:
    """The subscribers to an engine's state; any thread may call `push` and `end`.

    `watch(True)` asks the core to start sending snapshots, `watch(False)` to stop.
    """

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self._subscribers: dict[AsyncOutputQueue[EngineState], None] = {}
        self._lock = threading.Lock()

    async def subscribe(self) -> AsyncGenerator[EngineState, None]:
        """Yield snapshots until `end` is called; raise the error passed to it, if any."""
        queue: AsyncOutputQueue[EngineState] = AsyncOutputQueue()
        with self._lock:
            self._subscribers[queue] = None
        try:
            self._watch(True)
            while states := await queue.take():
                yield states[-1]
        finally:
            with self._lock:
                del self._subscribers[queue]
                if not self._subscribers:
                    self._watch(False)

    def push(self, state: EngineState) -> None:
        for queue in self._all():
            queue.call(_push_state, queue, state)

    def end(self, error: NanovllmError | None = None) -> None:
        """End all subscriptions, optionally with an error."""
        for queue in self._all():
            queue.call(queue.end, error)

    def _all(self) -> list[AsyncOutputQueue[EngineState]]:
        with self._lock:
            return list(self._subscribers)


def _push_state(queue: AsyncOutputQueue[EngineState], state: EngineState) -> None:
    """Replace an unread snapshot; keep its steps and ended sequences, up to MAX_UNREAD of each."""
    for before in queue.items:
        steps = [*before.steps, *state.steps][-MAX_UNREAD:]
        ended = [*before.ended, *state.ended][-MAX_UNREAD:]
        state = replace(state, steps=steps, ended=ended)
    queue.items.clear()
    queue.push(state)
