"""EngineClient: the requests in progress of all callers, and whose stream gets which output.

`LLM` uses it in its engine's thread, with the core itself. `AsyncLLM` guards it with a lock, and
its cores are replicas in other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from nanovllm.engine.output_processor import OutputProcessor, RequestState
from nanovllm.engine.request import EngineCoreOutputs, FinishedSequence, FinishReason
from nanovllm.outputs import StreamPiece


class Core(Protocol):
    """An `EngineCore`, or the connection to one in another process."""

    def finish(self, seq_id: int, reason: FinishReason) -> FinishedSequence | None:
        """End a sequence. If None is returned and it has not ended yet, a later step returns it."""


Q = TypeVar("Q")  # the type of the streams' queues


@dataclass(slots=True, eq=False)
class Stream(Generic[Q]):
    """The requests of one call, the core that runs them, and the queue where the caller waits."""

    core: Core
    queue: Q
    seq_ids: dict[int, None] = field(default_factory=dict)  # unfinished requests


class EngineClient(Generic[Q]):
    """Turns the outputs of cores into pieces for the streams that wait. Not thread-safe."""

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.output_processor = output_processor
        self.streams: dict[Stream[Q], None] = {}  # streams with unfinished requests
        self.owners: dict[int, Stream[Q]] = {}  # keyed by the seq_id of an unfinished request

    def begin(self, state: RequestState, stream: Stream[Q]) -> None:
        """Track a request that the caller passes to the stream's core."""
        self.output_processor.add(state)
        self.owners[state.seq_id] = stream
        self.streams[stream] = stream.seq_ids[state.seq_id] = None

    def collect(self, step: EngineCoreOutputs, core: Core) -> dict[Stream[Q], list[StreamPiece]]:
        """Return the new pieces of each stream; a request's last piece carries its output."""
        pieces: dict[Stream[Q], list[StreamPiece]] = {}
        for piece in self.output_processor.process(step, core.finish):
            stream = self.owners[piece.seq_id]
            if stream not in pieces:
                pieces[stream] = []
            pieces[stream].append(piece)
            if piece.output is not None:
                self._end(piece.seq_id)
        return pieces

    def abort(self, request_id: int | str) -> list[FinishedSequence]:
        """End a request, given its seq_id or request_id; several may share a request_id.

        Return the ended sequences that no later step returns.
        """
        finished = [
            self.owners[seq_id].core.finish(each, "abort")
            for seq_id in self.output_processor.seq_ids_of(request_id)
            for each in self.output_processor.unfinished(seq_id)
        ]
        return [each for each in finished if each is not None]

    def drop(self, stream: Stream[Q]) -> None:
        """Abort the unfinished requests of a stream, and discard their outputs."""
        for seq_id in list(stream.seq_ids):
            for each in self.output_processor.unfinished(seq_id):
                stream.core.finish(each, "abort")
            self.output_processor.forget(seq_id)
            self._end(seq_id)

    def fail(self, core: Core) -> list[Stream[Q]]:
        """Drop the streams of a core that failed, and return them."""
        failed = [stream for stream in self.streams if stream.core is core]
        for stream in failed:
            self.drop(stream)
        return failed

    def _end(self, seq_id: int) -> None:
        stream = self.owners.pop(seq_id)
        del stream.seq_ids[seq_id]
        if not stream.seq_ids:
            del self.streams[stream]
