"""OutputProcessor: turn tokens into text and finished outputs.

Nothing here imports torch, so it can run in a different process than the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import REPLACEMENT, Detokenizer
from nanovllm.engine.request import FinishedSequence, Request, TokenLogprobs
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

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a token; return whether it completes a stop string. Later tokens are ignored."""
        if self.num_kept is not None:
            return False
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.new_token_ids.append(token_id)
        if self.detokenizer is None or not self.detokenizer.push(token_id):
            return False
        self.num_kept = self.detokenizer.num_tokens
        return True

    def finish(self, finished: FinishedSequence) -> None:
        if self.num_kept is not None:
            finished = finished.stopped_at(self.num_kept)
        self.finished = finished
        if self.detokenizer is not None:
            self.detokenizer.finish()


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

    @property
    def unfinished(self) -> list[int]:
        """The seq_ids of its unfinished completions."""
        return [each.request.seq_id for each in self.completions if each.finished is None]


class OutputProcessor:
    """Builds stream pieces and outputs from the tokens of requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._texts: TokenTexts | None = None  # created by the first request with logprobs

    def piece(
        self, state: RequestState, completion: CompletionState, output: RequestOutput | None
    ) -> StreamPiece:
        """Return the new text and tokens of a completion; all, for a request that does not stream.

        `output` is set for the last piece of a request.
        """
        if not state.is_streaming and output is not None:
            whole = output.text, output.token_ids, output
            return StreamPiece(state.seq_id, *whole, index=state.index, request_id=state.request_id)
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

    def output(self, state: RequestState) -> RequestOutput:
        """Return the output of a request whose completions are all finished."""
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
            prompt_token_ids=request.prompt_token_ids,
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=best.finish_reason,
            num_cached_tokens=own.num_cached_tokens,
            queue_time=max(own.start_time - request.arrival_time, 0.0),
            time_to_first_token=max(own.first_token_time - request.arrival_time, 0.0),
            duration=max(each.end_time for each in results) - request.arrival_time,
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

    def _logprobs(self, entries: list[TokenLogprobs], num_top: int) -> CompletionLogprobs:
        from nanovllm.engine.logprobs import CompletionLogprobs, TokenTexts

        if self._texts is None:
            self._texts = TokenTexts(self.tokenizer)
        return CompletionLogprobs(entries, num_top, self._texts)


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
