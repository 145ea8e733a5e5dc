"""AsyncLLM: answers as asynchronous streams, over a core that runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.found_model import make_front
from nanovllm.engine.front import Live
from nanovllm.engine.request import FinishReason, check_length
from nanovllm.engine.step import Pooling
from nanovllm.errors import EngineError, NanovllmError
from nanovllm.outputs import EmbeddingOutput, RequestOutput, StreamPiece
from nanovllm.prompts import as_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.scoring import check_pooling, embedding_of
from nanovllm.serving.core_client import CoreClient
from nanovllm.serving.core_records import Add, CoreStats, CoreUpdate, Finish
from nanovllm.serving.restarts import MAX_SOON, SOON_SECONDS, Restarts
from nanovllm.serving.state_records import EngineNews
from nanovllm.serving.viewers import Viewers

STARTED_ANEW = "it is started anew"
GIVEN_UP = f"{MAX_SOON} in a row lasted less than {SOON_SECONDS:.0f} s, so no more are started"

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A language model that answers any number of callers at once.

    >>> llm = AsyncLLM("smollm2")
    >>> async for piece in llm.generate("The capital of France is"):
    ...     print(piece.text, end="")

    The model runs in another process, so tokenising, detokenising and whatever else this one does
    never hold up a step. A caller who does not read holds up nobody: what came for it is joined to
    one piece. When the process dies or hangs, every caller gets the error that says so; with
    `restart_core` another one is started, and answers new requests once it is ready.

    Other options are the fields of `nanovllm.config.EngineConfig`; more raise TypeError.
    """

    def __init__(self, model: str | Path, *, restart_core: bool = False, **options: Any) -> None:
        self.stats = CoreStats()
        self.error: NanovllmError | None = None  # why it cannot answer, for now or for good
        self._streams: dict[int, Stream] = {}  # by seq_id
        self._lock = threading.Lock()  # of the front, the streams, and which core there is
        self.viewers = Viewers(lambda is_on: self._core.watch(is_on))
        self._closing = threading.Event()
        self._restarts: Restarts | None = None  # not before the first core is ready
        self._given = EngineConfig(str(model), **options)
        self._core = CoreClient(self._given, self._update, self._fail)
        self._at_exit = weakref.finalize(self, self._core.close)
        try:
            found = self._core.wait_until_found()
            self.config, self.model_config = found.config, found.model_config
            self.generation_config = found.checkpoint.generation_config
            self.front = make_front(found, is_remote=True)
            ready = self._core.wait_until_ready()
        except BaseException:
            self._core.close()
            raise
        self.info, self.max_len = ready.info, ready.max_len
        with self._lock:
            self._raise_if_failed()
            self._restarts = Restarts() if restart_core else None

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield text as it comes; the last piece of a prompt has its `output`.

        Leaving the iterator early, or cancelling the task, aborts the request. Without
        `is_streaming` there is one piece, the last, and no work for others.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        live = await self._prepare(prompt, params, cache_salt, is_streaming)
        stream = Stream(asyncio.get_running_loop())
        self._begin(live, stream)
        is_over = False
        try:
            while not is_over:
                for piece in await stream.next():
                    is_over = piece.output is not None
                    yield piece
        finally:
            if not is_over:
                self._drop(live.seq_id)

    async def embed(
        self, prompt: Any, *, pooling: Pooling = "last", normalize: bool = True
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt, as `LLM.embed` does."""
        check_pooling(pooling)
        params = SamplingParams(max_tokens=1)
        live = await self._prepare(prompt, params, None, False, pooling)
        stream = Stream(asyncio.get_running_loop())
        self._begin(live, stream)
        output: RequestOutput | None = None
        try:
            (piece,) = await stream.next()
            output = piece.output
        finally:
            if output is None:
                self._drop(live.seq_id)
        assert output is not None
        return embedding_of(output, normalize)

    async def watch(self) -> AsyncGenerator[EngineNews, None]:
        """Yield the engine's state, then what changes, until the caller leaves."""
        self._raise_if_failed()
        async with contextlib.aclosing(self.viewers.look()) as news:
            async for each in news:
                yield each

    def abort(self, seq_id: int) -> None:
        """End a request now: its stream ends with what it had, for the reason "abort"."""
        with self._lock:
            unfinished = self.front.unfinished(seq_id)
        if unfinished:
            self._core.finish(Finish(unfinished, "abort"))

    def close(self) -> None:
        """End the process of the core; whoever waits gets an error. Once is enough."""
        self._closing.set()
        with self._lock:
            core = self._core
        core.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def num_requests(self) -> int:
        """Those that are under way."""
        return len(self._streams)

    @property
    def num_restarts(self) -> int:
        """Cores that took the place of others."""
        return 0 if self._restarts is None else self._restarts.num_restarts

    async def _prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        cache_salt: str | None,
        is_streaming: bool,
        pooling: Pooling | None = None,
    ) -> Live:
        """Check and tokenise a prompt in another thread: a long one takes a while."""
        self._raise_if_failed()
        one = as_prompt(prompt, cache_salt)
        live = await asyncio.to_thread(
            self.front.prepare, one.content, params, one.cache_salt, is_streaming, pooling
        )
        check_length(live.samples[0].request, self.max_len)
        return live

    def _begin(self, live: Live, stream: Stream) -> None:
        with self._lock:
            self._raise_if_failed()
            core = self._core
            self._streams[live.seq_id] = stream
            self.front.submit(live)
        core.add(Add([sample.request for sample in live.samples]))

    def _drop(self, seq_id: int) -> None:
        """End a request of which nothing more is wanted."""
        with self._lock:
            self._streams.pop(seq_id, None)
            unfinished = self.front.unfinished(seq_id)
            self.front.forget(seq_id)
        if unfinished:
            self._core.finish(Finish(unfinished, "abort", is_wanted=False))

    def _update(self, update: CoreUpdate) -> None:
        """In the core's thread: turn a step into text, and wake those who wait for it."""
        assert update.step is not None
        assert update.stats is not None
        self.stats = update.stats
        if update.news is not None:
            self.viewers.push(update.news)
        with self._lock:
            if not self._streams:  # an idle core may say so before there is a front
                return
            output = self.front.collect(update.step, self._finish_later)
            streamed = {piece.seq_id for piece in output.pieces}
            whole = [
                StreamPiece(each.seq_id, each.text, each.token_ids, each)
                for each in output.finished
                if each.seq_id not in streamed
            ]
            news: dict[asyncio.AbstractEventLoop, list[tuple[Stream, StreamPiece]]] = {}
            for piece in (*output.pieces, *whole):
                stream = self._streams[piece.seq_id]
                news.setdefault(stream.loop, []).append((stream, piece))
                if piece.output is not None:
                    del self._streams[piece.seq_id]
        for loop, pieces in news.items():
            _call(loop, _push_all, pieces)

    def _finish_later(self, seq_id: int, reason: FinishReason) -> None:
        self._core.finish(Finish([seq_id], reason))

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise _copy(self.error)

    def _fail(self, error: NanovllmError) -> None:
        """In the core's thread: tell everybody, and see to another core if there is to be one."""
        delay = None
        with self._lock:
            if self._restarts is not None and not self._closing.is_set():
                delay = self._restarts.delay()
                outlook = GIVEN_UP if delay is None else STARTED_ANEW
                error = EngineError(f"{error}; {outlook}")
                logger.error("%s", error)
            self.error = error
            stats = self.stats
            free = {"num_running": 0, "num_waiting": 0, "num_free_blocks": stats.num_blocks}
            self.stats = replace(stats, **free)
            streams, self._streams = list(self._streams.values()), {}
        self.viewers.fail(error)
        for stream in streams:
            _call(stream.loop, stream.fail, error)
        if delay is not None:
            threading.Thread(target=self._restart, args=[delay], daemon=True).start()

    def _restart(self, delay: float) -> None:
        """In a thread of its own: put another core in the place of the one that failed."""
        self._core.close()  # returns once its process is gone, and what it held is free
        self._closing.wait(delay)
        with self._lock:
            if self._closing.is_set():
                return
            core = self._core = CoreClient(self._given, self._update, self._fail)
            self._at_exit.detach()
            self._at_exit = weakref.finalize(self, core.close)
        try:
            core.wait_until_found()
            ready = core.wait_until_ready()
        except NanovllmError:
            return  # `_fail` was told, and sees to the next one
        with self._lock:
            if core.has_failed:
                return
            assert self._restarts is not None
            self._restarts.ready()
            self.info, self.max_len, self.error = ready.info, ready.max_len, None
        logger.warning("the engine core was started anew (process %d)", core.pid)


class Stream:
    """What came for one request and was not read yet; used in its event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pieces: dict[int, StreamPiece] = {}  # by sample
        self._error: NanovllmError | None = None
        self._has_news = asyncio.Event()

    async def next(self) -> list[StreamPiece]:
        """Wait for news: a piece for each sample that has some, the last one of all last."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            self._has_news.set()
            raise _copy(self._error)
        pieces, self._pieces = list(self._pieces.values()), {}
        return sorted(pieces, key=lambda piece: piece.output is not None)

    def push(self, piece: StreamPiece) -> None:
        before = self._pieces.get(piece.sample)
        self._pieces[piece.sample] = piece if before is None else _join(before, piece)
        self._has_news.set()

    def fail(self, error: NanovllmError) -> None:
        self._error = error
        self._has_news.set()


def _copy(error: NanovllmError) -> NanovllmError:
    """One for each who raises it, with a traceback of its own."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _join(first: StreamPiece, second: StreamPiece) -> StreamPiece:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
    )


def _push_all(pieces: list[tuple[Stream, StreamPiece]]) -> None:
    for stream, piece in pieces:
        stream.push(piece)


def _call(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    """Have a loop call a function; nobody waits any more in one that is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
