"""The requests from `LLM.add_request`, which run only in `LLM.step` and beside others."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import sleep
from typing import TYPE_CHECKING, ClassVar

from nanovllm.engine.output_processor import RequestState
from nanovllm.engine.request import EngineCoreOutputs
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput, StepOutput

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
