"""The one thread that steps an engine, for callers in any number of other threads.

A caller hands over a command and waits. Python deals with signals in the main thread alone, so a
Ctrl-C can end a caller's wait, but can never strike within a step, a hand-over or a clean-up.

Handing over is one call into C, and an interrupt is raised before or after such a call. That is why
callers prepare their commands first, and why no other call may stand between an `except` or
`finally` and the `post` that undoes what was begun.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from nanovllm.engine.front import Live
from nanovllm.engine.llm_engine import CLOSED, LLMEngine
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from nanovllm.serving.speeds import Speeds

MAX_AHEAD = 2  # steps that a stream is ahead of its reader before it asks for no more of them
LOOK_SECONDS = 0.1  # between a waiting caller's looks around
CLOSE_SECONDS = 5.0  # for the step that runs, before workers are killed

T = TypeVar("T")


class Promise(Generic[T]):
    """A value or an error that the engine's thread sets, and that one caller waits for."""

    def __init__(self) -> None:
        self.is_over = False
        self.value: T | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self, value: T | None = None, error: BaseException | None = None) -> None:
        if not self.is_over:
            self.value, self._error, self.is_over = value, error, True
            self._lock.release()

    def wait(self) -> bool:
        """Wait a moment; True once there is something."""
        return self.is_over or self._lock.acquire(timeout=LOOK_SECONDS)

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds the caller, who holds this promise
        return cast(T, self.value)


class Job(Promise[None]):
    """The requests of one `generate` or `stream` call, and what has come for them."""

    def __init__(
        self, requests: dict[int, Live], is_streaming: bool, is_open: bool = False
    ) -> None:
        super().__init__()
        self.requests = requests  # by place among the prompts of the call
        self.is_streaming = is_streaming
        self.is_open = is_open  # whether more requests may come
        self.places = {live.seq_id: i for i, live in requests.items()}  # unfinished ones
        self.outputs: dict[int, RequestOutput] = {}  # by place
        self.steps: SimpleQueue[StepOutput | None] = SimpleQueue()  # for a stream; None: the end
        self.speeds = Speeds()

    @property
    def wants_step(self) -> bool:
        return not self.is_streaming or self.steps.qsize() < MAX_AHEAD


class Ticket(Promise[StepOutput]):
    """One step that somebody asked for; what it finished is put back if it was not taken."""

    is_taken = False


class EngineThread:
    """Callers' methods stand first; those below `_run` are the thread's own, and so is the engine.

    A step runs while a job or a ticket wants one: without them the engine rests.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._jobs: dict[Job, None] = {}
        self._owners: dict[int, Job] = {}  # by seq_id; others' outputs go to whoever steps
        self._tickets: deque[Ticket] = deque()
        self._unclaimed: list[StreamPiece] = []  # of requests that no job owns
        self._is_stopped = False
        self._process = os.getpid()
        self._commands: SimpleQueue[tuple[Callable[[Any], None], Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; whoever calls this must see to `close` first, since an interrupt may follow."""
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()

    def run(self, job: Job, on_wait: Callable[[], None]) -> None:
        """Let the thread work until a job is over; leaving early drops the rest of it."""
        post, begin, cancel = self._commands.put, (self._begin, job), (self._cancel, job)
        try:
            post(begin)
            while not job.wait():
                on_wait()
                self._raise_if_gone()
        finally:
            post(cancel)
        job.result()

    def stream(self, job: Job) -> Generator[StepOutput, None, None]:
        """Yield every step of the engine while the job is under way, with what it has for it."""
        post, begin, cancel = self._commands.put, (self._begin, job), (self._cancel, job)
        look = (self._look, job)
        try:
            post(begin)
            while (step := self._next_step(job)) is not None:
                yield step
                post(look)
        finally:
            post(cancel)
        job.result()

    def extend(self, job: Job, requests: dict[int, Live], is_open: bool) -> None:
        """Add requests to a job that was begun open."""
        self._commands.put((self._extend, (job, requests, is_open)))

    def add(self, live: Live) -> None:
        """Queue a streaming request whose pieces `step` will return."""
        post, add, drop = self._commands.put, (self._add, live), (self._drop, live)
        try:
            post(add)
        except BaseException:
            post(drop)
            raise

    def step(self) -> StepOutput:
        """Run one step; what it finished of jobs goes to them."""
        ticket = Ticket()
        post, ask, give_back = self._commands.put, (self._ask, ticket), (self._give_back, ticket)
        try:
            post(ask)
            while not ticket.wait():
                self._raise_if_gone()
            result = ticket.result()
            ticket.is_taken = True  # no interrupt is looked for between this and the return
            return result
        except BaseException:
            post(give_back)
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between two steps."""
        promise: Promise[T] = Promise()
        self._commands.put((self._answer, (function, promise)))
        while not promise.wait():
            self._raise_if_gone()
        return promise.result()

    def is_finished(self) -> bool:
        return self.engine.is_finished() and not self._unclaimed

    def abort(self, request_id: int | str) -> RequestOutput | None:
        self._unclaimed = [
            piece for piece in self._unclaimed if request_id not in (piece.seq_id, piece.request_id)
        ]
        ended = [self.engine.abort(seq_id) for seq_id in self.engine.front.seq_ids_of(request_id)]
        outputs = [output for output in ended if output is not None]
        self._deliver_aborted(outputs)
        return outputs[0] if outputs else None

    def abort_all(self) -> list[RequestOutput]:
        self._unclaimed = []
        outputs = self.engine.abort_all()
        self._deliver_aborted(outputs)
        return outputs

    def check_caller(self) -> None:
        """Raise where nobody can wait for the thread."""
        self.check_process()
        if threading.current_thread() is self._thread:
            raise EngineError(
                "an engine cannot be used from within its own step, by a logits processor for "
                "instance: the step would wait for itself; make another engine for that"
            )

    def check_process(self) -> None:
        """Raise in a process that was forked from the engine's: the thread is not there."""
        if os.getpid() != self._process:
            raise EngineError(
                f"this engine belongs to process {self._process}, from which this one was forked; "
                "make an engine here, or give process pools the 'spawn' method"
            )

    def close(self) -> None:
        """End the thread and free the model, after the step that runs; once is enough.

        The interpreter must not end before the thread: it would be cut off within a step.
        """
        if os.getpid() != self._process:  # its end is its own process's affair
            return
        self._is_stopped = True
        self._commands.put((self._look, None))
        self._join(CLOSE_SECONDS)
        self.engine.close()  # workers that hang are killed, and nobody waits for them any more
        self._join(None)
        while not self._commands.empty():  # they hold on to this object, which holds them
            self._commands.get()

    def _join(self, seconds: float | None) -> None:
        thread = self._thread
        # The collector may close an engine from its own thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _raise_if_gone(self) -> None:
        self.check_process()
        if self._thread is None or not self._thread.is_alive():
            raise EngineError(CLOSED)

    def _next_step(self, job: Job) -> StepOutput | None:
        while True:
            try:
                return job.steps.get(timeout=LOOK_SECONDS)
            except Empty:
                self._raise_if_gone()

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                if self._commands.empty() and self._is_wanted():
                    self._step()
                else:
                    self._obey()
            except BaseException as error:
                if not self._is_stopped:
                    self._fail(error, f"the engine failed: {error!r}")
        self._fail(EngineError(CLOSED), CLOSED)

    def _is_wanted(self) -> bool:
        return bool(self._tickets) or any(job.wants_step for job in self._jobs)

    def _obey(self) -> None:
        command, argument = self._commands.get()
        command(argument)

    def _step(self) -> None:
        step = self.engine.step()
        self._deliver(step)
        if self._tickets:
            pieces, self._unclaimed = self._unclaimed, []
            finished = [piece.output for piece in pieces if piece.output is not None]
            self._tickets.popleft().set(replace(step, finished=finished, pieces=pieces))

    def _deliver(self, step: StepOutput) -> None:
        """Hand each result to the job that waits for it."""
        pieces: dict[Job, list[StreamPiece]] = {job: [] for job in self._jobs}
        finished: dict[Job, list[RequestOutput]] = {job: [] for job in self._jobs}
        for piece in step.pieces:
            job = self._owners.get(piece.seq_id)
            if job is None:
                self._unclaimed.append(piece)
            else:
                pieces[job].append(replace(piece, index=job.places[piece.seq_id]))
        for output in step.finished:
            owner = self._owners.pop(output.seq_id, None)
            if owner is not None:
                finished[owner].append(output)
                owner.outputs[owner.places.pop(output.seq_id)] = output
        for job in list(self._jobs):
            job.speeds.add_step(step)
            if job.is_streaming:
                job.steps.put(replace(step, finished=finished[job], pieces=pieces[job]))
            self._end_if_over(job)

    def _deliver_aborted(self, outputs: list[RequestOutput]) -> None:
        """Jobs get what another caller aborted of theirs; of other requests nothing more is due."""
        owned = [output for output in outputs if output.seq_id in self._owners]
        pieces = [
            StreamPiece(output.seq_id, "", [], output, request_id=output.request_id)
            for output in owned
            if self._owners[output.seq_id].is_streaming
        ]
        self._deliver(StepOutput(owned, pieces, 0, 0))

    def _fail(self, error: BaseException, message: str) -> None:
        """Tell everybody who waits.

        The first gets the error itself, the others a message: an error has one traceback only.
        """
        for job in list(self._jobs):
            self._drop_requests(job)
            self._end(job, error)
            error = EngineError(message)
        while self._tickets:
            self._tickets.popleft().set(error=error)
            error = EngineError(message)

    def _begin(self, job: Job) -> None:
        self._jobs[job] = None
        self._extend((job, job.requests, job.is_open))

    def _extend(self, argument: tuple[Job, dict[int, Live], bool]) -> None:
        job, requests, is_open = argument
        job.is_open = is_open
        if job not in self._jobs:  # it has failed, or was cancelled
            return
        try:
            for place, live in requests.items():
                job.places[live.seq_id] = place
                self.engine.submit(live)
                self._owners[live.seq_id] = job
        except Exception as error:
            self._drop_requests(job)
            self._end(job, error)
        else:
            self._end_if_over(job)

    def _cancel(self, job: Job) -> None:
        if job in self._jobs:
            self._drop_requests(job)
            self._end(job)

    def _look(self, _: object) -> None:
        """Wake the thread where it waits for commands: there may be something to do again."""

    def _drop_requests(self, job: Job) -> None:
        for seq_id in job.places:
            self.engine.drop(seq_id)
            self._owners.pop(seq_id, None)

    def _end_if_over(self, job: Job) -> None:
        if not job.places and not job.is_open:
            self._end(job)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        del self._jobs[job]
        job.set(error=error)
        job.steps.put(None)

    def _add(self, live: Live) -> None:
        with contextlib.suppress(EngineError):  # it failed meanwhile, as the next step will say
            self.engine.submit(live)

    def _drop(self, live: Live) -> None:
        self.engine.drop(live.seq_id)

    def _ask(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)

    def _give_back(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        elif ticket.value is not None and not ticket.is_taken:
            self._unclaimed = [*ticket.value.pieces, *self._unclaimed]

    def _answer(self, argument: tuple[Callable[[], T], Promise[T]]) -> None:
        function, promise = argument
        try:
            promise.set(function())
        except Exception as error:
            promise.set(error=error)
