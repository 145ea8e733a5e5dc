"""The engine behind `LLM`: an engine core, and the one thread that steps it for all callers.

Callers put commands into a queue and wait for results in another one. Python handles signals
only in the main thread, so Ctrl-C interrupts a caller's wait but never a step.
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
from nanovllm.engine.executor import ExecutorInfo
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import OutputProcessor, RequestState
from nanovllm.engine.prompts import as_prompt
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
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


class RequestGroup:
    """The requests of one call, such as `generate` or `stream`."""

    def __init__(self, is_streaming: bool) -> None:
        self.is_streaming = is_streaming  # True: receives every step; may pause the engine
        # Number of requests whose outputs are not taken yet; used only by the caller's thread.
        self.num_unfinished = 0
        self.indices: dict[int, int] = {}  # seq_id of an unfinished request -> prompt index
        self.steps: SimpleQueue[Any] = SimpleQueue()  # StepOutputs, or an error that ends the group

    @property
    def wants_step(self) -> bool:
        return not self.is_streaming or self.steps.qsize() < MAX_UNREAD


class EngineThread:
    """Runs an engine core in a thread, on behalf of callers in any thread.

    Any thread may call `prepare`, `stream`, `extend`, `call`, `close` and `raise_if_closed`. All
    other methods are for the engine's thread, or for a single caller while there are no groups. The
    engine steps while any group wants a step, and otherwise waits for commands.
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
        self._groups: dict[RequestGroup, None] = {}  # groups with unfinished requests
        self._owners: dict[int, RequestGroup] = {}  # keyed by seq_id
        self._unowned = RequestGroup(is_streaming=False)  # requests from `add_request`
        self._is_closed = False
        self._process = os.getpid()
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Register `close` before this call: an interrupt may follow at once."""
        self._thread.start()

    def prepare(
        self, prompt: Any, params: SamplingParams, cache_salt: str | None = None, **options: Any
    ) -> RequestState:
        """Validate and tokenize a prompt in any form, without queueing it."""
        self.raise_if_closed()
        item = as_prompt(prompt, cache_salt)
        state = self.input_processor.process(item.content, params, item.cache_salt, **options)
        self.core.check(state.completions[0].request)
        return state

    def stream(
        self, group: RequestGroup, requests: dict[int, RequestState]
    ) -> Generator[StepOutput, None, None]:
        """Yield steps with the outputs for a group, until all its requests are finished.

        `requests` is keyed by prompt index. Closing the generator early aborts unfinished requests.
        """
        cancel = partial(self._cancel, group)
        try:
            self.extend(group, requests)
            while group.num_unfinished:
                step = self._wait(group.steps)
                group.num_unfinished -= len(step.finished)
                yield step
                if group.is_streaming:
                    self._commands.put(_wake)  # the group may want another step now
        finally:
            self._commands.put(cancel)

    def extend(self, group: RequestGroup, requests: dict[int, RequestState]) -> None:
        """Add requests to a group."""
        group.num_unfinished += len(requests)
        self._commands.put(partial(self._add, group, requests))

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
        self._commands.put(_wake)
        self._join(CLOSE_SECONDS)
        self.input_processor.close()
        self.core.executor.close()  # kills workers that hang, which unblocks the thread
        self._join(None)
        while not self._commands.empty():  # break reference cycles between commands and the engine
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
        """Run one step and return the new outputs of requests from `add_request`.

        They include outputs of steps that ran for other callers since the previous call.
        """
        step, steps = self._step(), []
        while not self._unowned.steps.empty():
            steps.append(self._unowned.steps.get())
        pieces = [piece for each in steps for piece in each.pieces]
        return replace(step, pieces=pieces, finished=[o for each in steps for o in each.finished])

    def is_finished(self) -> bool:
        return not self.core.has_unfinished and self._unowned.steps.empty()

    def abort(self, request_id: int | str) -> RequestOutput | None:
        """Abort a request, given its seq_id or request_id; return its partial output, if any.

        If several requests share the request_id, all are aborted, and one output is returned.
        """
        aborted = []
        for seq_id in self.output_processor.seq_ids_of(request_id):
            found = (
                self.core.finish(each, "abort") for each in self.output_processor.unfinished(seq_id)
            )
            aborted += [each for each in found if each is not None]
        step = self.output_processor.process(EngineCoreOutputs([], [], aborted), self.core.finish)
        # Groups receive the outputs of their requests; other outputs are only returned.
        finished = [output for output in step.finished if output.seq_id in self._owners]
        pieces = [piece for piece in step.pieces if piece.seq_id in self._owners]
        self._deliver(replace(step, finished=finished, pieces=pieces))
        return step.finished[0] if step.finished else None

    def abort_all(self) -> list[RequestOutput]:
        """Abort every request; return their partial outputs."""
        outputs = [self.abort(seq_id) for seq_id in list(self.output_processor.states)]
        self._unowned = RequestGroup(is_streaming=False)
        return [output for output in outputs if output is not None]

    def drop(self, seq_id: int) -> None:
        """Abort a request and discard its output."""
        for each in self.output_processor.unfinished(seq_id):
            self.core.finish(each, "abort")
        self.output_processor.forget(seq_id)

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

    def _join(self, seconds: float | None) -> None:
        # Garbage collection may call `close` in the engine's own thread.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                if self._commands.empty() and any(group.wants_step for group in self._groups):
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
        """Pass each output to the group that its request belongs to."""
        pieces: dict[RequestGroup, list[StreamPiece]] = {
            group: [] for group in (*self._groups, self._unowned)
        }
        finished: dict[RequestGroup, list[RequestOutput]] = {group: [] for group in pieces}
        for piece in step.pieces:
            owner = self._owners.get(piece.seq_id, self._unowned)
            pieces[owner].append(replace(piece, index=owner.indices.get(piece.seq_id, 0)))
        for output in step.finished:
            owner = self._owners.pop(output.seq_id, self._unowned)
            owner.indices.pop(output.seq_id, None)
            finished[owner].append(output)
        for group in pieces:
            if group.is_streaming or finished[group] or pieces[group]:
                group.steps.put(replace(step, finished=finished[group], pieces=pieces[group]))
            if not group.indices:
                self._groups.pop(group, None)

    def _fail(self, error: BaseException) -> None:
        """Fail all groups: the first gets the error itself, the others an EngineError about it."""
        message = f"the engine failed: {error!r}"
        for group in list(self._groups):
            self._cancel(group)
            group.steps.put(error)
            error = EngineError(message)

    def _add(self, group: RequestGroup, requests: dict[int, RequestState]) -> None:
        self._groups[group] = None
        try:
            for index, state in requests.items():
                self.submit(state)
                group.indices[state.seq_id] = index
                self._owners[state.seq_id] = group
        except Exception as error:
            self._cancel(group)
            group.steps.put(error)
        if not group.indices:
            self._groups.pop(group, None)

    def _cancel(self, group: RequestGroup) -> None:
        for seq_id in group.indices:
            self.drop(seq_id)
            del self._owners[seq_id]
        group.indices.clear()
        self._groups.pop(group, None)


def _wake() -> None:
    """Do nothing; as a command, it makes the thread check its groups again."""


def _put_result(function: Callable[[], T], results: SimpleQueue[T | BaseException]) -> None:
    try:
        results.put(function())
    except Exception as error:
        results.put(error)
