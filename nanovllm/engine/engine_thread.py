"""The engine behind `LLM`: an engine core, and the one thread that steps it for all callers.

Callers put commands into a queue and wait for results in another one. Python handles signals
only in the main thread, so Ctrl-C interrupts a caller's wait but never a step.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.added_requests import UnreadPieces
from nanovllm.engine.core import EngineCore
from nanovllm.engine.engine_client import EngineClient, Stream
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.prompts import as_prompt
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.engine.run_loop import run_loop
from nanovllm.errors import EngineError
from nanovllm.outputs import StreamPiece
from nanovllm.sampling_params import SamplingParams

CLOSED = "the engine is closed; create a new one"
FORKED = (
    "this process was forked from the engine's process and lacks the engine's thread; create an "
    "engine here, or use the 'spawn' start method for process pools"
)
OWN_STEP = (
    "an engine cannot be called from within its own step, for example by a logits processor: the "
    "step would wait for itself; create another engine for that"
)
MAX_UNREAD = 2  # a stream with this many unread steps requests no further step
POLL_SECONDS = 0.1  # interval at which a waiting caller checks whether the engine was closed
CLOSE_SECONDS = 5.0  # grace period for the current step, before workers are killed

T = TypeVar("T")
Pieces = list[StreamPiece]


class PieceQueue(Protocol):
    """The pieces of a stream that its caller has not read yet."""

    @property
    def wants_step(self) -> bool:
        """Whether the engine should step for this stream."""

    def put(self, pieces: Pieces) -> None:
        """Add the pieces of one step."""

    def fail(self, error: BaseException) -> bool:
        """End the stream with an error; return whether a caller waits for its pieces."""


@dataclass(slots=True, eq=False)
class BlockingQueue:
    """The pieces of each step that a caller has not read yet, or an error that ends its stream."""

    max_unread: float  # the caller wants no step while this many are unread
    steps: SimpleQueue[Pieces | BaseException] = field(default_factory=SimpleQueue)

    @property
    def wants_step(self) -> bool:
        return self.steps.qsize() < self.max_unread

    def put(self, pieces: Pieces) -> None:
        self.steps.put(pieces)

    def fail(self, error: BaseException) -> bool:
        self.steps.put(error)
        return True


class EngineThread:
    """Runs an engine core in a thread, on behalf of callers in any thread.

    Any thread may call `prepare`, `run`, `call`, `close` and `raise_if_closed`. All other methods
    are for the engine's thread, or for a single caller while nothing is run. The engine steps
    while any stream wants a step, and otherwise waits for commands.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        input_processor: InputProcessor,
        core: EngineCore,
        info: ExecutorInfo,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.input_processor, self.core, self.info = input_processor, core, info
        self.client: EngineClient[PieceQueue] = EngineClient(input_processor.tokenizer)
        self.unread = UnreadPieces()
        self.added: Stream[PieceQueue] = Stream(core, self.unread)  # requests of `LLM.add_request`
        self._is_closed = False
        self._process = os.getpid()
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Register `close` before this call: an interrupt may follow at once."""
        self._thread.start()

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        cache_salt: str | None = None,
        index: int = 0,
        **options: Any,
    ) -> RequestState:
        """Validate and tokenize a prompt in any form, without queueing it."""
        self.raise_if_closed()
        item = as_prompt(prompt, cache_salt, self.input_processor.image_reader.refusal)
        state = self.input_processor.process(
            item.content, params, item.cache_salt, images=item.images, **options
        )
        self.core.check(state.completions[0].request)
        state.index = index
        return state

    def run(
        self,
        requests: Iterable[RequestState],
        *,
        is_streaming: bool,
        max_unfinished: int | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Yield pieces until all requests are finished; closing the generator aborts the others.

        With `max_unfinished`, requests are read as earlier ones finish. A caller that streams
        pauses the engine while it does not read.
        """
        self.raise_if_closed()
        queue = BlockingQueue(MAX_UNREAD if is_streaming else math.inf)
        stream: Stream[PieceQueue] = Stream(self.core, queue)
        drop, unread = partial(self.client.drop, stream), iter(requests)
        try:
            num_unfinished = self._send(stream, islice(unread, max_unfinished))
            while num_unfinished:
                pieces = self._wait(queue.steps)
                num_finished = sum(piece.output is not None for piece in pieces)
                num_added = self._send(stream, islice(unread, num_finished))
                num_unfinished += num_added - num_finished
                yield from pieces
        finally:
            self._commands.put(drop)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps, and return its result."""
        results: SimpleQueue[T | BaseException] = SimpleQueue()
        self._commands.put(partial(_put_result, function, results))
        return self._wait(results)

    def close(self) -> None:
        """End the thread after the current step and free the model; a second call does nothing.

        Call this before the interpreter exits, which would kill the thread inside a step.
        """
        if os.getpid() != self._process:  # a forked child must not close its parent's engine
            return
        self._is_closed = True
        self._commands.put(None)
        self._join(CLOSE_SECONDS)
        self.input_processor.close()
        self.core.executor.close()  # kills workers that hang, which unblocks the thread
        self._join(None)
        # Break reference cycles between commands and the engine. A thread that closes its own
        # engine still needs the command that ends it.
        while not self._thread.is_alive() and not self._commands.empty():
            self._commands.get()

    def raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError(CLOSED)

    def submit(self, state: RequestState, stream: Stream[PieceQueue]) -> None:
        """Queue a prepared request, whose pieces go to `stream`."""
        self.raise_if_closed()
        for completion in state.completions:
            self.core.add(completion.request)
        self.client.begin(state, stream)

    def step(self) -> EngineCoreOutputs:
        """Run one step and send its pieces to their streams; an error ends all requests."""
        self.raise_if_closed()
        try:
            step = self.core.step()
            for stream, pieces in self.client.collect(step, self.core).items():
                stream.queue.put(pieces)
        except BaseException as error:
            self._fail(error)
            raise
        return step

    def _wait(self, results: SimpleQueue[T | BaseException]) -> T:
        """Wait for a result from the engine's thread; raise it if it is an error."""
        if threading.current_thread() is self._thread:
            raise EngineError(OWN_STEP)
        while True:
            self.raise_if_closed()
            if os.getpid() != self._process:
                raise EngineError(FORKED)
            try:
                result = results.get(timeout=POLL_SECONDS)
                break
            except Empty:
                continue
        if isinstance(result, BaseException):
            self.raise_if_closed()  # closing the executor makes the step in progress fail
            try:
                raise result
            finally:
                del result  # break the reference cycle: the traceback refers to this frame
        return result

    def _send(self, stream: Stream[PieceQueue], requests: Iterable[RequestState]) -> int:
        """Add requests to a stream, even none, and return their number; this wakes the thread."""
        states = list(requests)
        self._commands.put(partial(self._add, stream, states))
        return len(states)

    def _join(self, seconds: float | None) -> None:
        # Garbage collection may call `close` in the engine's own thread.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                run_loop(self._commands, self.step, self._wait_seconds)
            except BaseException as error:
                self._fail(error)

    def _wait_seconds(self) -> float | None:
        wants_step = any(stream.queue.wants_step for stream in self.client.streams)
        return self.core.wait_seconds if wants_step else None

    def _fail(self, error: BaseException) -> None:
        """Fail all streams.

        The first caller that waits gets the error itself, the others an EngineError about it.
        """
        message = f"the engine failed: {error!r}"
        for stream in self.client.fail(self.core):
            if stream.queue.fail(error):
                error = EngineError(message)

    def _add(self, stream: Stream[PieceQueue], states: list[RequestState]) -> None:
        try:
            for state in states:
                self.submit(state, stream)
        except Exception as error:
            self.client.drop(stream)
            stream.queue.fail(error)


def _put_result(function: Callable[[], T], results: SimpleQueue[T | BaseException]) -> None:
    try:
        results.put(function())
    except Exception as error:
        results.put(error)
