"""AsyncLLM: asynchronous generation, with engine cores in their own processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.assembly import create_input_processor, engine_config
from nanovllm.config import serving_target
from nanovllm.engine.conversations import ChatOptions, Messages, prompts_of, template_options
from nanovllm.engine.engine_client import EngineClient, Stream
from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.prompts import as_prompt
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.engine.scoring import embedding_of
from nanovllm.engine.step import Pooling
from nanovllm.errors import ConfigError, EngineError, NanovllmError, RequestError
from nanovllm.outputs import EmbeddingOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.core_messages import CoreStats, total
from nanovllm.serve.output_queue import AsyncOutputQueue, copy_error
from nanovllm.serve.replica import MAX_FAILURES, SOON_SECONDS, Replica
from nanovllm.serve.routing import PrefixRouter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from nanovllm.engine.engine_options import EngineOptions
    from nanovllm.serve.live.engine_state import EngineState


GUESSED_TOKENS = 256  # completion length assumed for load balancing, unless max_tokens is less
RESTARTING = "it is being restarted"
GIVEN_UP = (
    f"it failed {MAX_FAILURES} times in a row within {SOON_SECONDS:.0f} s of starting, so it is "
    "not restarted"
)
PieceQueue = AsyncOutputQueue[StreamPiece]

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A language model that serves any number of concurrent asyncio callers.

    >>> llm = AsyncLLM("smollm2")
    >>> async for piece in llm.generate("The capital of France is"):
    ...     print(piece.text, end="")

    The engine core runs in another process, so tokenization, detokenization and other work in this
    process never delay a step. Nor does a slow reader: its unread pieces are merged.
    If the engine's process dies or hangs, every caller gets an error; with `restart_core`, a new
    engine replaces it and serves new requests once it is ready.

    With `data_parallel_size` above 1 there are several replicas: engine cores that each have a copy
    of the model. A request goes to the replica that has cached its prefix, or else to the least
    loaded one. If a replica dies or hangs, only its own requests fail.

    By default, prefill chunks are limited so that each stream gets a token about every
    `target_inter_token_ms`, and CUDA graphs are captured before the engine is ready. If
    `target_inter_token_ms` is None, throughput has priority, as in `LLM`.

    With `in_process` the engine core runs in a thread of this process instead, so that
    `breakpoint()` works in it. The watchdog is off, so the core may pause for any length of time.

    All other options are those of `LLM`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        restart_core: bool = False,
        in_process: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        # Guards the client, the router and the replicas.
        self._lock = threading.Lock()
        # A separate pool, so that slow grammars delay only other requests with grammars.
        self._compiling = ThreadPoolExecutor(16, "nanovllm-prepare")
        self._in_process = in_process
        self._is_ready = self._restart_core = False
        self._closing = threading.Event()
        options.setdefault("target_inter_token_ms", serving_target())
        given = self._given = engine_config(model, options)
        if in_process and given.data_parallel_size > 1:
            raise ConfigError("in_process runs one engine; leave out data_parallel_size")
        numbers = range(given.data_parallel_size)
        self._router = PrefixRouter(numbers, given.kvcache_block_size)
        self.replicas: list[Replica] = []
        atexit.register(self.close)
        try:
            self.replicas.append(self._start(0))
            # The first replica downloads the model if needed; the others then find it locally.
            found = self.replicas[0].found.result()
            self.replicas += map(self._start, numbers[1:])
            self.config, self.model_config = found.config, found.model_config
            self.generation_config = found.checkpoint.generation_config
            self.input_processor = create_input_processor(found, is_remote=True)
            tokenizer = self.input_processor.tokenizer
            self.client: EngineClient[PieceQueue] = EngineClient(tokenizer)
            gc.collect()  # avoid a full collection during the first requests: see `start_core`
            infos = [replica.wait_until_ready().info for replica in self.replicas]
            # A cached prefix has a block in each group of layers.
            self._router.max_blocks = min(info.num_blocks // len(info.windows) for info in infos)
            # The memory for recurrent states may limit the number of running sequences.
            limits = [info.states.num_slots for info in infos if info.states is not None]
            max_num_seqs = min([self.config.max_num_seqs, *limits])
            self.config = replace(self.config, max_num_seqs=max_num_seqs)
            with self._lock:  # from now on, failed replicas may be restarted
                for error in filter(None, (replica.error for replica in self.replicas)):
                    raise error
                self._is_ready, self._restart_core = True, restart_core
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield text as it is generated; the last piece carries the request's `output`.

        Closing the iterator early, or canceling the task, aborts the request; so does `abort`
        with its `request_id`. With `is_streaming=False` only the last piece is produced, which
        takes less work.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._generate(prompt, params, cache_salt, is_streaming, request_id=request_id)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        is_streaming: bool = True,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[StreamPiece, None]:
        """Generate a reply to one conversation, formatted with the model's chat template."""
        given = template_options(options)
        prompts = await asyncio.to_thread(prompts_of, self.input_processor, messages, **given)
        if len(prompts) > 1:
            raise RequestError(
                f"AsyncLLM.chat takes one conversation, got {len(prompts)}; call it once for each"
            )
        stream = self.generate(
            prompts[0],
            sampling_params,
            request_id,
            cache_salt=cache_salt,
            is_streaming=is_streaming,
        )
        async with contextlib.aclosing(stream) as pieces:
            async for piece in pieces:
                yield piece

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; raise RequestError if `skip_tokenizer_init` is set."""
        return self.input_processor.get_tokenizer()

    async def embed(
        self, prompt: Any, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt, as `LLM.embed` does."""
        pooling = pooling or self.input_processor.default_pooling or "last"
        params = SamplingParams(max_tokens=1)
        (piece,) = [each async for each in self._generate(prompt, params, None, False, pooling)]
        assert piece.output is not None
        return embedding_of(piece.output, normalize)

    async def watch(self, engine: int = 0) -> AsyncGenerator[EngineState, None]:
        """Yield snapshots of the replica with this index as it changes, until the caller stops.

        There are at most ten per second, unless the replica is paused.
        """
        replica = self.replicas[engine]
        if replica.error is not None:
            raise copy_error(replica.error)
        async with contextlib.aclosing(replica.watch()) as states:
            async for state in states:
                yield state

    def abort(self, seq_id: int | str) -> None:
        """Abort a request, given its seq_id or request_id.

        Its stream ends with the output so far and the finish reason "abort".
        """
        with self._lock:
            self.client.abort(seq_id)

    def close(self, reason: NanovllmError | None = None) -> None:
        """Stop all engine cores; pending requests fail. Later calls do nothing."""
        self._closing.set()
        atexit.unregister(self.close)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            replicas = list(self.replicas)
        for replica in replicas:
            if reason is not None:
                self._lost(replica, reason)
            replica.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def num_requests(self) -> int:
        """Number of requests in progress."""
        return len(self.client.owners)

    @property
    def max_len(self) -> int:
        """Maximum sequence length that every replica supports."""
        return min(replica.max_len for replica in self.replicas)

    @property
    def stats(self) -> CoreStats:
        """Statistics summed over all replicas."""
        return total([replica.stats for replica in self.replicas])

    @property
    def error(self) -> NanovllmError | None:
        """The first replica's error if all have failed, temporarily or permanently, else None."""
        errors = [replica.error for replica in self.replicas]
        return None if None in errors else errors[0]

    def _start(self, number: int) -> Replica:
        calls = self._collect, self._lost
        if not self._in_process:
            return Replica(self._given, number, *calls)
        from nanovllm.serve.core_process import serve  # imports torch

        return Replica(self._given, number, *calls, serve)

    async def _generate(
        self,
        prompt: Any,
        params: SamplingParams,
        cache_salt: str | None,
        is_streaming: bool,
        pooling: Pooling | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[StreamPiece, None]:
        self._raise_if_failed()
        one = as_prompt(prompt, cache_salt, self.input_processor.image_reader.refusal)
        given = one.content, params, one.cache_salt, is_streaming, pooling, request_id, one.images
        is_short = isinstance(one.content, list) and not one.images
        state = await self._prepare(partial(self.input_processor.process, *given), is_short, params)
        state.completions[0].request.check_length(self.max_len)
        stream = self._begin(state)
        is_over = False
        try:
            while not is_over:
                for piece in merged(await stream.queue.take()):
                    is_over = piece.output is not None
                    yield piece
        finally:
            if not is_over:
                with self._lock:
                    self._router.finished(state.seq_id)
                    self.client.drop(stream)

    async def _prepare(
        self, prepare: Callable[[], RequestState], is_short: bool, params: SamplingParams
    ) -> RequestState:
        """Validate and tokenize a prompt, in another thread if that may take long.

        Short work stays in the event loop's thread. Another thread could start only once this
        thread releases the GIL, so the first of many callers would wait for the others.
        """
        asked = params.structured_outputs if isinstance(params, SamplingParams) else None
        if asked is not None:
            pool = (
                None if self.input_processor.get_grammars().is_compiled(asked) else self._compiling
            )
            return await asyncio.get_running_loop().run_in_executor(pool, prepare)
        if is_short and not getattr(params, "bad_words", ()):
            return prepare()
        return await asyncio.to_thread(prepare)

    def _begin(self, state: RequestState) -> Stream[PieceQueue]:
        """Send a request to the replica that has cached its prefix, or to the least loaded one."""
        requests = [completion.request for completion in state.completions]
        first = requests[0]
        lengths = [min(each.params.max_new_tokens, GUESSED_TOKENS) for each in requests]
        has_choice = self.config.enable_prefix_caching and len(self.replicas) > 1
        ids = first.token_ids if has_choice else ()
        with self._lock:
            self._raise_if_failed()
            number = self._router.choose(ids, first.cache_salt)
            replica = self.replicas[number]
            self._router.started(state.seq_id, number, len(first.token_ids) + sum(lengths))
            stream: Stream[PieceQueue] = Stream(replica, AsyncOutputQueue())
            self.client.begin(state, stream)
        replica.add(requests)
        if first.images:  # pickling their pixels takes long; a later message flushes before itself
            stream.queue.loop.run_in_executor(None, replica.flush)
        else:
            stream.queue.loop.call_soon(replica.flush)  # sends requests of several callers together
        return stream

    def _collect(self, replica: Replica, step: EngineCoreOutputs) -> None:
        """Detokenize the outputs of a step and wake their readers. Runs in a replica's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[PieceQueue, StreamPiece]]] = {}
        with self._lock:
            if not self._is_ready:  # a core that starts has no requests
                return
            for stream, pieces in self.client.collect(step, replica).items():
                for piece in pieces:
                    by_loop.setdefault(stream.queue.loop, []).append((stream.queue, piece))
                    if piece.output is not None:
                        self._router.finished(piece.seq_id)
        for pairs in by_loop.values():  # one call per event loop
            pairs[0][0].call(_push_all, pairs)

    def _raise_if_failed(self) -> None:
        error = self.error
        if error is not None:
            raise copy_error(error)

    def _lost(self, replica: Replica, error: NanovllmError) -> None:
        """Fail all requests of a replica, and restart it if configured to.

        Runs in the thread of the replica; the other replicas are unaffected.
        """
        delay = None
        with self._lock:
            if self._is_ready and not self._closing.is_set():
                if self._restart_core:
                    delay = replica.restart_delay()
                    outlook = GIVEN_UP if delay is None else RESTARTING
                    what, *traceback = str(error).split("\n", 1)
                    error = EngineError("\n".join([f"{what}; {outlook}", *traceback]))
                logger.error("%s", error)
            replica.fail(error)
            self._router.lost(replica.number)
            for stream in self.client.fail(replica) if self._is_ready else []:
                stream.queue.call(stream.queue.end, error)
        replica.end_snapshots(error)
        if delay is not None:
            threading.Thread(target=self._replace, args=[replica, delay], daemon=True).start()

    def _replace(self, lost: Replica, delay: float) -> None:
        """Start a new replica in place of a failed one. Runs in its own thread."""
        lost.close()  # returns once its process has ended and its memory is free
        self._closing.wait(delay)
        with self._lock:
            if self._closing.is_set():
                return
            replica = self.replicas[lost.number] = self._start(lost.number)
            replica.take_place_of(lost)
        try:
            replica.wait_until_ready()
        except NanovllmError:
            return  # `_lost` was called and schedules the next restart
        with self._lock:
            if replica.has_failed:
                return
            replica.num_restarts += 1
            replica.error = None
            self._router.joined(replica.number)
        logger.warning("%s was restarted (process %d)", replica.name, replica.pid)


def merged(pieces: list[StreamPiece]) -> list[StreamPiece]:
    """Merge the pieces of each completion into one; the piece with the output stays last."""
    by_sample: dict[int, list[StreamPiece]] = {}
    for piece in pieces:
        by_sample.setdefault(piece.sample, []).append(piece)
    return sorted(map(_merge, by_sample.values()), key=lambda piece: piece.output is not None)


def _merge(pieces: list[StreamPiece]) -> StreamPiece:
    if len(pieces) == 1:
        return pieces[0]
    logprobs = [each for piece in pieces for each in piece.logprobs or ()]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=logprobs or None,
    )


def _push_all(pairs: list[tuple[PieceQueue, StreamPiece]]) -> None:
    for queue, piece in pairs:
        queue.push(piece)
