"""AsyncLLM: answers as asynchronous streams, over a core that runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
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
from nanovllm.errors import NanovllmError
from nanovllm.outputs import EmbeddingOutput, RequestOutput, StreamPiece
from nanovllm.prompts import as_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.scoring import check_pooling, embedding_of
from nanovllm.serving.core_client import CoreClient
from nanovllm.serving.core_records import Add, CoreStats, CoreUpdate, Finish
from nanovllm.serving.state_records import EngineNews
from nanovllm.serving.viewers import Viewers


class AsyncLLM:
    """A language model that answers any number of callers at once.

    >>> llm = AsyncLLM("smollm2")
    >>> async for piece in llm.generate("The capital of France is"):
    ...     print(piece.text, end="")

    The model runs in another process, so tokenising, detokenising and whatever else this one does
    never hold up a step. A caller who does not read holds up nobody: what came for it is joined to
    one piece. When the process dies or hangs, every caller gets the error that says so.

    Keyword arguments are the fields of `nanovllm.config.EngineConfig`; others raise TypeError.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.stats = CoreStats()
        self.error: NanovllmError | None = None  # why it can answer no more
        self._streams: dict[int, Stream] = {}  # by seq_id
        self._lock = threading.Lock()  # of the front and the streams
        self.viewers = Viewers(lambda is_on: self._core.watch(is_on))
        self._core = CoreClient(EngineConfig(str(model), **options), self._update, self._fail)
        weakref.finalize(self, self._core.close)  # when it is dropped, or the interpreter exits
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
        self._core.raise_if_failed()
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
        self._core.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def num_requests(self) -> int:
        """Those that are under way."""
        return len(self._streams)

    async def _prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        cache_salt: str | None,
        is_streaming: bool,
        pooling: Pooling | None = None,
    ) -> Live:
        """Check and tokenise a prompt in another thread: a long one takes a while."""
        self._core.raise_if_failed()
        one = as_prompt(prompt, cache_salt)
        live = await asyncio.to_thread(
            self.front.prepare, one.content, params, one.cache_salt, is_streaming, pooling
        )
        check_length(live.samples[0].request, self.max_len)
        return live

    def _begin(self, live: Live, stream: Stream) -> None:
        with self._lock:
            self._core.raise_if_failed()
            self._streams[live.seq_id] = stream
            self.front.submit(live)
        self._core.add(Add([sample.request for sample in live.samples]))

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

    def _fail(self, error: NanovllmError) -> None:
        with self._lock:
            self.error = error
            streams, self._streams = list(self._streams.values()), {}
        self.viewers.fail(error)
        for stream in streams:
            _call(stream.loop, stream.fail, error)


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
            raise type(self._error)(*self._error.args) from self._error.__cause__
        pieces, self._pieces = list(self._pieces.values()), {}
        return sorted(pieces, key=lambda piece: piece.output is not None)

    def push(self, piece: StreamPiece) -> None:
        before = self._pieces.get(piece.sample)
        self._pieces[piece.sample] = piece if before is None else _join(before, piece)
        self._has_news.set()

    def fail(self, error: NanovllmError) -> None:
        self._error = error
        self._has_news.set()


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
