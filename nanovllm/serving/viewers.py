"""Those who watch an engine: each gets its state first, then every change, or the state anew."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable

from nanovllm.errors import NanovllmError
from nanovllm.serving.state_records import EngineNews, EngineState

MAX_UNREAD = 64  # changes; who is further behind gets the whole state instead


class Viewers:
    """`watch` tells the core to begin, from a whole state, or to stop; any thread may push."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self._viewers: dict[Viewer, None] = {}
        self._lock = threading.Lock()

    async def look(self) -> AsyncGenerator[EngineNews, None]:
        """Yield news until they are closed; raise what ended the engine."""
        viewer = Viewer(asyncio.get_running_loop(), lambda: self._watch(True))
        with self._lock:
            self._viewers[viewer] = None
        try:
            while (news := await viewer.next()) is not None:
                yield news
        finally:
            with self._lock:
                del self._viewers[viewer]
                if not self._viewers:
                    self._watch(False)

    def push(self, news: EngineNews) -> None:
        self._call_all(lambda viewer: viewer.push(news))

    def fail(self, error: NanovllmError) -> None:
        self._call_all(lambda viewer: viewer.end(error))

    def close(self) -> None:
        """End what everybody sees, without an error."""
        self._call_all(lambda viewer: viewer.end(None))

    def _call_all(self, tell: Callable[[Viewer], None]) -> None:
        with self._lock:
            viewers = list(self._viewers)
        for viewer in viewers:
            try:
                viewer.loop.call_soon_threadsafe(tell, viewer)
            except RuntimeError:
                if not viewer.loop.is_closed():
                    raise


class Viewer:
    """What came for one of them and was not read yet; used in its event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> None:
        self.loop = loop
        self._ask = ask
        self._news: list[EngineNews] = []
        self._is_lost = True  # until a whole state comes
        self._is_over = False
        self._error: NanovllmError | None = None
        self._has_news = asyncio.Event()

    async def next(self) -> EngineNews | None:
        while not self._news and not self._is_over:
            if self._is_lost:
                self._ask()
            self._has_news.clear()
            await self._has_news.wait()
        if self._is_over and self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        return None if self._is_over else self._news.pop(0)

    def push(self, news: EngineNews) -> None:
        if isinstance(news, EngineState):
            self._news, self._is_lost = [news], False
        elif self._is_lost:
            return
        elif len(self._news) < MAX_UNREAD:
            self._news.append(news)
        else:
            self._news, self._is_lost = [], True
        self._has_news.set()

    def end(self, error: NanovllmError | None) -> None:
        self._is_over, self._error = True, error
        self._has_news.set()
