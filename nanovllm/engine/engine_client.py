"""EngineClient: tracks the requests in progress, and the stream that receives each one's outputs.

`LLM` uses it in its engine's thread, with the core itself. `AsyncLLM` guards it with a lock, and
its cores are replicas in other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from nanovllm.engine.output_processor import CompletionState, OutputProcessor, RequestState
from nanovllm.engine.request import EngineCoreOutputs, FinishedSequence, FinishReason
from nanovllm.outputs import StreamPiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    requests: dict[int, RequestState] = field(default_factory=dict)  # unfinished ones, by seq_id


class EngineClient(Generic[Q]):
    """Tracks requests, and turns the outputs of cores into pieces for the streams that wait.

    Not thread-safe.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.output_processor = OutputProcessor(tokenizer)
        self.streams: dict[Stream[Q], None] = {}  # streams with unfinished requests
        self.owners: dict[int, Stream[Q]] = {}  # seq_id of an unfinished request -> its stream
        # Unfinished completions, keyed by their own seq_ids.
        self._completions: dict[int, tuple[RequestState, CompletionState]] = {}

    def begin(self, state: RequestState, stream: Stream[Q]) -> None:
        """Track a request that the caller passes to the stream's core."""
        self.streams[stream] = None
        self.owners[state.seq_id] = stream
        stream.requests[state.seq_id] = state
        for completion in state.completions:
            self._completions[completion.request.seq_id] = state, completion

    def collect(self, step: EngineCoreOutputs, core: Core) -> dict[Stream[Q], list[StreamPiece]]:
        """Return the new pieces of each stream; a request's last piece carries its output."""
        changed = self._advance(step, core)
        last = {state.seq_id: completion for state, completion in changed}
        pieces: dict[Stream[Q], list[StreamPiece]] = {}
        for state, completion in changed:
            stream, output = self.owners[state.seq_id], None
            if state.num_unfinished == 0 and last[state.seq_id] is completion:
                output = self.output_processor.output(state)
                self._end(state.seq_id)
            if state.is_streaming or output is not None:
                piece = self.output_processor.piece(state, completion, output)
                pieces.setdefault(stream, []).append(piece)
        return pieces

    def abort(self, request_id: int | str) -> list[FinishedSequence]:
        """End a request, given its seq_id or request_id; several may share a request_id.

        Return the ended sequences that no later step returns.
        """
        finished = []
        for seq_id in self._seq_ids_of(request_id):
            stream = self.owners[seq_id]
            for each in stream.requests[seq_id].unfinished:
                finished.append(stream.core.finish(each, "abort"))
        return [each for each in finished if each is not None]

    def drop(self, stream: Stream[Q]) -> None:
        """Abort the unfinished requests of a stream, and discard their outputs."""
        for seq_id, state in list(stream.requests.items()):
            for each in state.unfinished:
                stream.core.finish(each, "abort")
            self._end(seq_id)

    def fail(self, core: Core) -> list[Stream[Q]]:
        """Drop all streams of a failed core, and return them."""
        failed = [stream for stream in self.streams if stream.core is core]
        for stream in failed:
            self.drop(stream)
        return failed

    def _advance(
        self, step: EngineCoreOutputs, core: Core
    ) -> list[tuple[RequestState, CompletionState]]:
        """Add the tokens of a step to their completions; return those that changed.

        A stop string ends its sequence. Until the core returns the ended sequence, more tokens may
        arrive for it; so may tokens of a request that was dropped.
        """
        known = self._completions
        ended = {each.seq_id: each for each in step.finished if each.seq_id in known}
        columns = step.seq_ids, step.token_ids, step.logprobs
        for seq_id, token_id, logprobs in zip(*columns, strict=True):
            if seq_id in known and known[seq_id][1].push(token_id, logprobs):
                finished = ended.get(seq_id) or core.finish(seq_id, "stop")
                if finished is not None:
                    ended[seq_id] = finished
        seq_ids = dict.fromkeys((*step.seq_ids, *ended))
        changed = [known[seq_id] for seq_id in seq_ids if seq_id in known]
        for seq_id, finished in ended.items():
            state, completion = known.pop(seq_id)
            completion.finish(finished)
            state.num_unfinished -= 1
        return changed

    def _seq_ids_of(self, request_id: int | str) -> list[int]:
        if not isinstance(request_id, str):
            return [request_id] if request_id in self.owners else []
        streams = self.owners.items()
        return [i for i, stream in streams if stream.requests[i].request_id == request_id]

    def _end(self, seq_id: int) -> None:
        """Stop tracking a request; later outputs for it are ignored."""
        stream = self.owners.pop(seq_id)
        for completion in stream.requests.pop(seq_id).completions:
            self._completions.pop(completion.request.seq_id, None)
        if not stream.requests:
            del self.streams[stream]
