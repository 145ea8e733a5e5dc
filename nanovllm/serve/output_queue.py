"""Asynchronous queues, one per reader, so that a slow reader does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nanovllm.errors import NanovllmError

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
