"""The requests from `LLM.add_request`, which run only in `LLM.step` and beside others.

`SteppingMethods` is called in any thread, and `AddedRequests` in that of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, ClassVar

from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.prompts import Prompts
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.engine_thread import EngineThread, Pieces


@dataclass(slots=True, eq=False)
class UnreadPieces:
    """The pieces that `step` has not returned yet, and the error that it raises after them."""

    wants_step: ClassVar[bool] = False  # only `step` runs a step for these requests
    pieces: Pieces = field(default_factory=list)
    error: EngineError | None = None

    def put(self, pieces: Pieces) -> None:
        self.pieces += pieces

    def fail(self, error: BaseException) -> bool:
        is_known = isinstance(error, EngineError)
        # A new error, because another caller may raise the given one.
        self.error = EngineError(str(error) if is_known else f"the engine failed: {error!r}")
        return False

    def take(self) -> Pieces:
        pieces, self.pieces = self.pieces, []
        return pieces


@dataclass(frozen=True, slots=True)
class AddedRequests:
    """Steps an engine for the requests of `EngineThread.added`, and aborts those of all callers.

    All methods are for the engine's thread, or for a single caller while nothing is run.
    """

    engine: EngineThread

    def submit(self, state: RequestState) -> None:
        self.engine.submit(state, self.engine.added)

    def step(self) -> StepOutput:
        """Run one step and return the new pieces of these requests.

        They include pieces of steps that ran for other callers since the previous call.
        """
        step, unread = EngineCoreOutputs([], [], []), self.engine.unread
        error = unread.error
        if error is None:
            sleep(self.engine.core.wait_seconds)
            try:
                step = self.engine.step()
            except BaseException:
                unread.error = None  # the caller gets the error itself
                raise
        pieces = unread.take()
        if error is not None and not pieces:
            unread.error = None
            raise error
        finished = [piece.output for piece in pieces if piece.output is not None]
        return StepOutput(finished, pieces, step.num_prefill_tokens, step.num_decode_tokens)

    def is_finished(self) -> bool:
        is_read = not self.engine.unread.pieces and self.engine.unread.error is None
        return is_read and not self.engine.core.has_unfinished

    def abort(self, request_id: int | str) -> RequestOutput | None:
        """Abort a request, given its seq_id or request_id; return its partial output, if any.

        If several requests share the request_id, all are aborted, and one output is returned.
        """
        client = self.engine.client
        aborted = EngineCoreOutputs([], [], client.abort(request_id))
        streams = client.collect(aborted, self.engine.core)
        outputs = [
            each.output for new in streams.values() for each in new if each.output is not None
        ]
        streams.pop(self.engine.added, None)  # `step` does not return these again
        for stream, pieces in streams.items():
            stream.queue.put(pieces)
        return outputs[0] if outputs else None

    def abort_all(self) -> list[RequestOutput]:
        """Abort every request; return their partial outputs."""
        outputs = [self.abort(seq_id) for seq_id in list(self.engine.client.owners)]
        self.engine.unread.take()
        self.engine.unread.error = None
        return [output for output in outputs if output is not None]


class SteppingMethods:
    """The methods of `LLM` with which the caller steps the engine."""

    engine: EngineThread
    added: AddedRequests

    def add_request(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Queue one prompt for `step`; return its seq_id."""
        params = SamplingParams() if sampling_params is None else sampling_params
        state = self.engine.prepare(
            prompt, params, cache_salt, is_streaming=True, request_id=request_id
        )
        self.engine.call(partial(self.added.submit, state))
        return state.seq_id

    def step(self) -> StepOutput:
        """Run one engine step; return the new outputs of the requests from `add_request`.

        `pieces` holds the new tokens and text, `finished` the outputs of requests that finished.
        """
        return self.engine.call(self.added.step)

    def is_finished(self) -> bool:
        """Return whether all requests have finished, and `step` has returned their outputs."""
        return self.engine.call(self.added.is_finished)

    def abort(self, seq_id: int | str) -> RequestOutput | None:
        """Abort a request, given its seq_id or request_id.

        Returns its partial output, or None if it is not running.
        """
        return self.engine.call(partial(self.added.abort, seq_id))

    def abort_all(self) -> list[RequestOutput]:
        """Abort all requests of all callers; return their partial outputs."""
        return self.engine.call(self.added.abort_all)
