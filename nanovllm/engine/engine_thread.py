"""The engine behind `LLM`: its core and the one thread that steps it for all callers.

Callers put commands into a queue and wait for results in another. Python handles signals in the
main thread alone, so Ctrl-C ends a caller's wait, and never strikes within a step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.core import EngineCore
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import OutputProcessor, RequestState
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.engine.step import ExecutorInfo
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

CLOSED = "the engine is closed; make a new one"
FORKED = (
    "this process was forked from the engine's, whose thread it does not have; make an engine "
    "here, or give process pools the 'spawn' method"
)
OWN_STEP = (
    "an engine cannot be used from within its own step, by a logits processor for instance: the "
    "step would wait for itself; make another engine for that"
)
MAX_UNREAD = 2  # steps of a stream that its reader has not taken before it asks for no more
POLL_SECONDS = 0.1  # between a waiting caller's checks that the engine is not closed
CLOSE_SECONDS = 5.0  # for the current step, before workers are killed

T = TypeVar("T")


class RequestGroup:
    """The requests of one call of `generate` or `stream`."""

    def __init__(self, is_streaming: bool) -> None:
        self.is_streaming = is_streaming  # gets every step, and waits for its reader
        self.num_unfinished = 0  # requests whose outputs the caller has not taken; the caller's own
        self.indices: dict[int, int] = {}  # by seq_id of unfinished requests: that of the prompt
        self.steps: SimpleQueue[Any] = SimpleQueue()  # StepOutputs, or the error that ends the job

    @property
    def wants_step(self) -> bool:
        return not self.is_streaming or self.steps.qsize() < MAX_UNREAD


class EngineThread:
    """Any thread may call `prepare`, `stream`, `extend`, `call` and `close`.

    Everything else is for the thread, or for a single caller while there are no jobs. A step runs
    while a job wants one; otherwise the engine rests.
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
        self.output_processor = OutputProcessor(input_processor.tokenizer)
        self._jobs: dict[RequestGroup, None] = {}  # those with unfinished requests
        self._owners: dict[int, RequestGroup] = {}  # by seq_id
        self._unowned = RequestGroup(is_streaming=False)  # of requests whose outputs `step` returns
        self._is_closed = False
        self._process = os.getpid()
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Arrange for `close` first: an interrupt may follow."""
        self._thread.start()

    def prepare(
        self, prompt: str | list[int], params: SamplingParams, **options: Any
    ) -> RequestState:
        """Check and tokenize a prompt, as `InputProcessor.process` does; nothing is queued yet."""
        self.raise_if_closed()
        state = self.input_processor.process(prompt, params, **options)
        self.core.check(state.completions[0].request)
        return state

    def stream(
        self, job: RequestGroup, requests: dict[int, RequestState]
    ) -> Generator[StepOutput, None, None]:
        """Yield steps with what they have for a job, until all its requests, by index, are over.

        Leaving early drops the rest.
        """
        cancel = partial(self._cancel, job)
        try:
            self.extend(job, requests)
            while job.num_unfinished:
                step = self._wait(job.steps)
                job.num_unfinished -= len(step.finished)
                yield step
                if job.is_streaming:
                    self._commands.put(_wake)  # there is room for another step
        finally:
            self._commands.put(cancel)

    def extend(self, job: RequestGroup, requests: dict[int, RequestState]) -> None:
        """Add requests to a job."""
        job.num_unfinished += len(requests)
        self._commands.put(partial(self._add, job, requests))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between two steps, and return its result."""
        results: SimpleQueue[T | BaseException] = SimpleQueue()
        self._commands.put(partial(_answer, function, results))
        return self._wait(results)

    def close(self) -> None:
        """End the thread and free the model, after the current step; a second call does nothing.

        The interpreter must not end before the thread: it would be cut off within a step.
        """
        if os.getpid() != self._process:  # a forked child has no part of the engine
            return
        self._is_closed = True
        self._commands.put(_wake)
        self._join(CLOSE_SECONDS)
        self.input_processor.close()
        self.core.executor.close()  # workers that hang are killed, which ends the wait for them
        self._join(None)
        while not self._commands.empty():  # commands and the engine refer to each other
            self._commands.get()

    def raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError(CLOSED)

    def submit(self, state: RequestState) -> None:
        """Queue a prepared request."""
        self.raise_if_closed()
        for completion in state.completions:
            self.core.add(completion.request)
        self.output_processor.add(state)

    def step(self) -> StepOutput:
        """Run one step and return what is new of requests that no job owns.

        The outputs may stem from an earlier step that was in flight.
        """
        step, news = self._step(), []
        while not self._unowned.steps.empty():
            news.append(self._unowned.steps.get())
        pieces = [piece for each in news for piece in each.pieces]
        return replace(step, pieces=pieces, finished=[o for each in news for o in each.finished])

    def is_finished(self) -> bool:
        return not self.core.has_unfinished and self._unowned.steps.empty()

    def abort(self, request_id: int | str) -> RequestOutput | None:
        """End a request now, by seq_id or request_id; returns what it had, if it was running."""
        aborted = []
        for seq_id in self.output_processor.seq_ids_of(request_id):
            found = (
                self.core.finish(each, "abort") for each in self.output_processor.unfinished(seq_id)
            )
            aborted += [each for each in found if each is not None]
        step = self.output_processor.process(EngineCoreOutputs([], [], aborted), self.core.finish)
        # Jobs receive the outputs of their requests; for others there is only the return value.
        finished = [output for output in step.finished if output.seq_id in self._owners]
        pieces = [piece for piece in step.pieces if piece.seq_id in self._owners]
        self._deliver(replace(step, finished=finished, pieces=pieces))
        return step.finished[0] if step.finished else None

    def abort_all(self) -> list[RequestOutput]:
        """End every request now; returns what each had."""
        outputs = [self.abort(seq_id) for seq_id in list(self.output_processor.states)]
        self._unowned = RequestGroup(is_streaming=False)
        return [output for output in outputs if output is not None]

    def drop(self, seq_id: int) -> None:
        """End a request and discard its output."""
        for each in self.output_processor.unfinished(seq_id):
            self.core.finish(each, "abort")
        self.output_processor.forget(seq_id)

    def _wait(self, results: SimpleQueue[T | BaseException]) -> T:
        """Wait for a result of the thread; raise it if it is an error."""
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
            try:
                raise result
            finally:
                del result  # its traceback has this frame, which would hold it in turn
        return result

    def _join(self, seconds: float | None) -> None:
        # The collector may close an engine from its own thread.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                if self._commands.empty() and any(job.wants_step for job in self._jobs):
                    self._step()
                else:
                    self._commands.get()()
            except BaseException as error:
                self._fail(error)

    def _step(self) -> StepOutput:
        self.raise_if_closed()
        step = self.output_processor.process(self.core.step(), self.core.finish)
        self._deliver(step)
        return step

    def _deliver(self, step: StepOutput) -> None:
        """Hand each result to the job that waits for it."""
        pieces: dict[RequestGroup, list[StreamPiece]] = {
            job: [] for job in (*self._jobs, self._unowned)
        }
        finished: dict[RequestGroup, list[RequestOutput]] = {job: [] for job in pieces}
        for piece in step.pieces:
            owner = self._owners.get(piece.seq_id, self._unowned)
            pieces[owner].append(replace(piece, index=owner.indices.get(piece.seq_id, 0)))
        for output in step.finished:
            owner = self._owners.pop(output.seq_id, self._unowned)
            owner.indices.pop(output.seq_id, None)
            finished[owner].append(output)
        for job in pieces:
            if job.is_streaming or finished[job] or pieces[job]:
                job.steps.put(replace(step, finished=finished[job], pieces=pieces[job]))
            if not job.indices:
                self._jobs.pop(job, None)

    def _fail(self, error: BaseException) -> None:
        """Raise in every waiting caller: the error itself in one, since it has one traceback."""
        message = f"the engine failed: {error!r}"
        for job in list(self._jobs):
            self._cancel(job)
            job.steps.put(error)
            error = EngineError(message)

    def _add(self, job: RequestGroup, requests: dict[int, RequestState]) -> None:
        self._jobs[job] = None
        try:
            for index, state in requests.items():
                self.submit(state)
                job.indices[state.seq_id] = index
                self._owners[state.seq_id] = job
        except Exception as error:
            self._cancel(job)
            job.steps.put(error)
        if not job.indices:
            self._jobs.pop(job, None)

    def _cancel(self, job: RequestGroup) -> None:
        for seq_id in job.indices:
            self.drop(seq_id)
            del self._owners[seq_id]
        job.indices.clear()
        self._jobs.pop(job, None)


def _wake() -> None:
    """End a wait for commands: there may be something to do."""


def _answer(function: Callable[[], T], results: SimpleQueue[T | BaseException]) -> None:
    try:
        results.put(function())
    except Exception as error:
        results.put(error)
