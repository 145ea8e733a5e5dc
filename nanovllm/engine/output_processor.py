"""OutputProcessor: turn the engine core's tokens into text and finished outputs.

Nothing here imports torch, so it can run in a different process than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import REPLACEMENT, Detokenizer
from nanovllm.engine.request import (
    EngineCoreOutputs,
    FinishedSequence,
    FinishReason,
    Request,
    TokenLogprobs,
)
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.engine.logprobs import CompletionLogprobs, TokenTexts


@dataclass(slots=True, eq=False)
class CompletionState:
    """State of one completion of a request in progress."""

    index: int
    request: Request
    detokenizer: Detokenizer | None
    new_token_ids: list[int] = field(default_factory=list)  # tokens not streamed yet
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if requested
    num_kept: int | None = None  # number of tokens up to the end of the stop string, if found
    finished: FinishedSequence | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in progress, kept until all its completions are finished."""

    prompt: str | None
    is_streaming: bool
    completions: list[CompletionState]
    num_unfinished: int
    request_id: str
    index: int = 0  # index of the prompt among those of the same call

    @property
    def seq_id(self) -> int:
        """Id of the first completion; identifies the whole request."""
        return self.completions[0].request.seq_id


class OutputProcessor:
    """Tracks the requests in progress and builds their outputs. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._texts: TokenTexts | None = None  # created by the first request with logprobs
        self.states: dict[int, RequestState] = {}  # keyed by seq_id
        # Keyed by the completion's own seq_id.
        self._completions: dict[int, tuple[RequestState, CompletionState]] = {}

    def add(self, state: RequestState) -> None:
        """Start tracking a request and its completions."""
        self.states[state.seq_id] = state
        for completion in state.completions:
            self._completions[completion.request.seq_id] = state, completion

    def forget(self, seq_id: int) -> None:
        """Stop tracking a request; later outputs for it are ignored."""
        state = self.states.pop(seq_id, None)
        for completion in () if state is None else state.completions:
            self._completions.pop(completion.request.seq_id, None)

    def seq_ids_of(self, request_id: int | str) -> list[int]:
        """Return the seq_ids that a seq_id, or a request_id chosen by a caller, refers to."""
        if not isinstance(request_id, str):
            return [request_id]
        return [i for i, state in self.states.items() if state.request_id == request_id]

    def unfinished(self, seq_id: int) -> list[int]:
        """Return the seq_ids of a request's unfinished completions."""
        completions = self.states[seq_id].completions if seq_id in self.states else []
        return [each.request.seq_id for each in completions if each.finished is None]

    def process(
        self,
        step: EngineCoreOutputs,
        finish: Callable[[int, FinishReason], FinishedSequence | None],
    ) -> list[StreamPiece]:
        """Turn the outputs of a step into text; `finish` ends a sequence at a stop string.

        Return the new pieces; for a request that does not stream, one with the whole output.

        If `finish` returns None, a later step delivers the finished sequence. Until then, more
        tokens may arrive for a sequence that was stopped or dropped here.
        """
        known = self._completions
        by_id = {each.seq_id: each for each in step.finished if each.seq_id in known}
        columns = step.seq_ids, step.token_ids, step.logprobs
        for seq_id, token_id, logprobs in zip(*columns, strict=True):
            if seq_id not in known or known[seq_id][1].num_kept is not None:
                continue
            _, completion = known[seq_id]
            if logprobs is not None:
                completion.logprobs.append(logprobs)
            completion.new_token_ids.append(token_id)
            detokenizer = completion.detokenizer
            if detokenizer is not None and detokenizer.push(token_id):
                completion.num_kept = detokenizer.num_tokens
                finished = by_id.get(seq_id) or finish(seq_id, "stop")
                if finished is not None:
                    by_id[seq_id] = finished
        seq_ids = dict.fromkeys((*step.seq_ids, *by_id))
        changed = [known[seq_id] for seq_id in seq_ids if seq_id in known]
        outputs: dict[int, RequestOutput] = {}
        for finished in by_id.values():
            output = self.finish(finished)
            if output is not None:
                outputs[output.seq_id] = output
        # The last piece of a request carries its output.
        last = {state.seq_id: completion for state, completion in changed}
        pieces = []
        for state, completion in changed:
            output = outputs.get(state.seq_id) if last[state.seq_id] is completion else None
            if state.is_streaming:
                pieces.append(self._piece(state, completion, output))
            elif output is not None:
                pieces.append(_whole_piece(state, output))
        return pieces

    def finish(self, finished: FinishedSequence) -> RequestOutput | None:
        """Finish a completion; return the request's output if none of its completions is left."""
        state, completion = self._completions.pop(finished.seq_id)
        if completion.num_kept is not None:
            finished = finished.stopped_at(completion.num_kept)
        completion.finished = finished
        if completion.detokenizer is not None:
            completion.detokenizer.finish()
        state.num_unfinished -= 1
        if state.num_unfinished > 0:
            return None
        del self.states[state.seq_id]
        outputs = [self._completion(each) for each in state.completions]
        request, best = state.completions[0].request, outputs[0]
        results = [each.finished for each in state.completions if each.finished is not None]
        own, broken = results[0], [each for each in results if each.finish_reason == "error"]
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        num_top = request.params.prompt_logprobs
        if num_top is not None:
            from nanovllm.engine.logprobs import PromptLogprobs

            prompt_logprobs = PromptLogprobs(self._logprobs(own.prompt_logprobs, num_top))
        return RequestOutput(
            seq_id=state.seq_id,
            prompt=state.prompt,
            prompt_token_ids=request.token_ids.tolist(),
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=best.finish_reason,
            num_cached_tokens=own.num_cached_tokens,
            queue_time=max(own.start_time - request.arrival_time, 0.0),
            time_to_first_token=max(own.first_token_time - request.arrival_time, 0.0),
            duration=finished.end_time - request.arrival_time,
            error=(broken[0].error or request.why_broken()) if broken else None,
            logprobs=best.logprobs,
            cumulative_logprob=best.cumulative_logprob,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            pooled=None if own.pooled is None else own.pooled.tolist(),
            request_id=state.request_id,
            num_accepted_tokens=sum(each.drafts.num_accepted_tokens for each in results),
            num_rejected_tokens=sum(each.drafts.num_rejected_tokens for each in results),
        )

    def _completion(self, completion: CompletionState) -> CompletionOutput:
        finished, params, tokenizer = completion.finished, completion.request.params, self.tokenizer
        assert finished is not None
        if completion.detokenizer is not None:
            text = completion.detokenizer.text
        else:
            text = "" if tokenizer is None else _decode(tokenizer, finished.token_ids, params)
        logprobs = cumulative = None
        if params.logprobs is not None:
            entries = completion.logprobs[: len(finished.token_ids)]
            logprobs = self._logprobs(entries, params.logprobs)
            cumulative = logprobs.cumulative
        return CompletionOutput(
            index=completion.index,
            text=text,
            token_ids=finished.token_ids,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            finish_reason=finished.finish_reason,
            stop_reason=_stop_reason(completion, finished),
        )

    def _piece(
        self, state: RequestState, completion: CompletionState, output: RequestOutput | None
    ) -> StreamPiece:
        """Return the new text and tokens of a streamed completion."""
        token_ids, completion.new_token_ids = completion.new_token_ids, []
        text = completion.detokenizer.take() if completion.detokenizer is not None else ""
        num_top, logprobs = completion.request.params.logprobs, None
        if token_ids and num_top is not None:
            logprobs = self._logprobs(completion.logprobs[-len(token_ids) :], num_top)
        return StreamPiece(
            state.seq_id,
            text,
            token_ids,
            output,
            logprobs,
            completion.index,
            state.index,
            state.request_id,
        )

    def _logprobs(self, entries: list[TokenLogprobs], num_top: int) -> CompletionLogprobs:
        from nanovllm.engine.logprobs import CompletionLogprobs, TokenTexts

        if self._texts is None:
            self._texts = TokenTexts(self.tokenizer)
        return CompletionLogprobs(entries, num_top, self._texts)


def _whole_piece(state: RequestState, output: RequestOutput) -> StreamPiece:
    """Return the only piece of a request that does not stream."""
    whole = output.text, output.token_ids, output
    return StreamPiece(output.seq_id, *whole, index=state.index, request_id=state.request_id)


def _decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], params: SamplingParams
) -> str:
    """Decode a whole completion to the same text that streaming would produce."""
    skip_special = params.skip_special_tokens
    text = tokenizer.decode(token_ids, skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if REPLACEMENT not in text:
        return text
    # With byte tokens, an invalid byte can also turn valid neighbors into U+FFFD, unlike in
    # incremental decoding.
    detokenizer = Detokenizer(tokenizer, params)
    for token_id in token_ids:
        detokenizer.push(token_id)
    detokenizer.finish()
    return detokenizer.text


def _stop_reason(completion: CompletionState, finished: FinishedSequence) -> str | int | None:
    """Return the stop string or token that ended a completion, or else `finished.stop_reason`."""
    if finished.finish_reason != "stop":
        return finished.stop_reason
    if completion.detokenizer is not None and completion.detokenizer.found_stop is not None:
        return completion.detokenizer.found_stop
    last = finished.token_ids[-1]
    return last if last in tuple(completion.request.params.stop_token_ids) else None
