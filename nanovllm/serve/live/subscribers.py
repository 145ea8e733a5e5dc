"""The subscribers to snapshots of an engine; a slow one does not delay the others."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from nanovllm.errors import NanovllmError
from nanovllm.serve.live.engine_state import EngineState
from nanovllm.serve.output_queue import AsyncOutputQueue

MAX_UNREAD = 4096  # maximum number of steps, and of ended sequences, kept for a slow reader


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
