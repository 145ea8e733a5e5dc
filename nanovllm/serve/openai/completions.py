"""OpenAI's completions API: /v1/completions, for prompts given as text or token ids."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field, model_validator

from nanovllm.engine.logprobs import text_within
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.generation import ApiResponse, GenerationJob, Logprobs, Update
from nanovllm.serve.http_responses import Event
from nanovllm.serve.openai.openai_logprobs import prompt_logprobs_by_id, token_bytes
from nanovllm.serve.protocol import MAX_TOP_LOGPROBS, SamplingFields, StreamOptions, Texts
from nanovllm.serve.service import Service
from nanovllm.validation import require

DEFAULT_MAX_TOKENS = 16
_Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionRequest(SamplingFields):
    prompt: Texts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        is_valid = self.max_tokens != 0 or self.echo
        require(is_valid, "max_tokens", "at least 1, or 0 with echo", self.max_tokens)
        return self


async def create_completion(service: Service, request: CompletionRequest) -> CompletionResponse:
    """Validate a request; generation starts when the response's events are read."""
    service.check_model(request.model)
    special = request.add_special_tokens
    options = {} if special is None else {"add_special_tokens": special}
    prompts = await service.all_token_ids(request.prompt, "prompt", **options)
    prompts = list(map(request.truncate, prompts))
    service.check_num_sequences(len(prompts), request.n or 1)
    limits = (request.max_tokens, DEFAULT_MAX_TOKENS, "prompt")
    lengths = [service.max_tokens(len(prompt), *limits) for prompt in prompts]
    params = [_params(service, request, length) for length in lengths]
    # Prompt logprobs are known only with the final output, so nothing is streamed before it.
    is_streaming = bool(request.stream) and params[0].prompt_logprobs is None
    job = GenerationJob(prompts, params, request.cache_salt, is_streaming, request.grammar_param)
    return CompletionResponse(service, job, request)


def _params(service: Service, request: CompletionRequest, max_tokens: int) -> SamplingParams:
    prompt_logprobs = request.prompt_logprobs
    if request.echo and (request.logprobs is not None or not max_tokens):
        prompt_logprobs = max(request.logprobs or 0, prompt_logprobs or 0)
    return request.sampling_params(
        service.options.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=request.constraint(),
    )


class OpenAIResponse(ApiResponse):
    """A chat or completion stream: chunks with choices, usage if requested, then [DONE]."""

    end = b"data: [DONE]\n\n"
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, job: GenerationJob, request: SamplingFields) -> None:
        super().__init__(service, job)
        self.request = request
        self.is_large = not job.is_streaming  # each event is a whole choice
        self.is_begun = [False] * job.num_choices
        self._options = request.stream_options or StreamOptions()
        self._head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def chunk(self, update: Update) -> Event:
        """Return the fields of a chunk, including `choices`; empty if there is nothing new."""
        raise NotImplementedError

    def render(self, update: Update) -> Iterator[Event]:
        if fields := self.chunk(update):
            if self._options.continuous_usage_stats:
                fields["usage"] = self.usage.openai()
            elif self._options.include_usage:
                fields["usage"] = None
            yield {"object": self.chunk_kind, **self._head, **fields}

    def last_events(self) -> Iterator[Event]:
        if self._options.include_usage:
            head = {"object": self.chunk_kind, **self._head}
            yield {**head, "choices": [], "usage": self.usage.openai()}

    def whole(self, events: list[Event]) -> Event:
        choices = [choice for event in events for choice in event["choices"]]
        choices.sort(key=lambda choice: choice["index"])
        usage = self.usage.openai()
        return {"object": self.kind, **self._head, "choices": choices, "usage": usage}


class CompletionResponse(OpenAIResponse):
    request: CompletionRequest

    def __init__(self, service: Service, job: GenerationJob, request: CompletionRequest) -> None:
        super().__init__(service, job, request)
        self._offsets = [0] * job.num_choices  # number of characters of each choice so far
        num_decoders = 0 if request.logprobs is None else job.num_choices
        self._decoders = [_Decoder("replace") for _ in range(num_decoders)]

    def chunk(self, update: Update) -> Event:
        return {"choices": [self._choice(update)]}

    def _choice(self, update: Update) -> dict[str, Any]:
        index, request = update.choice, self.request
        text, token_ids, logprobs = update.text, list(update.token_ids), update.logprobs
        columns = None
        prompt = self.job.prompts[index // self.job.params[0].n]
        is_first, self.is_begun[index] = not self.is_begun[index], True
        if request.echo and is_first:
            text = self._echo(prompt, token_ids) + text
        if request.logprobs is not None:
            prompt_logprobs = update.prompt_logprobs if request.echo else None
            columns = partial(
                self._columns, index, prompt, prompt_logprobs or [], token_ids, logprobs or []
            )
        choice = {
            "index": index,
            "text": text,
            "logprobs": columns,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = prompt if is_first else None
        if request.prompt_logprobs is not None and update.finish_reason is not None:
            choice["prompt_logprobs"] = partial(prompt_logprobs_by_id, update.prompt_logprobs)
        return choice

    def _echo(self, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
        """Return the prompt's text, plus any space that decoding the first output token drops."""
        tokenizer = self.service.tokenizer
        echo = str(tokenizer.decode(prompt, skip_special_tokens=False))
        if not token_ids:
            return echo
        alone = str(tokenizer.decode([token_ids[0]]))
        return echo + text_within(tokenizer, token_ids[0]).removesuffix(alone)

    def _columns(
        self,
        choice: int,
        prompt: Sequence[int],
        prompt_logprobs: Sequence[dict[int, Logprob] | None],
        token_ids: Sequence[int],
        logprobs: Logprobs,
    ) -> dict[str, list[Any]]:
        """Return the logprobs as one list per field; echoed prompt tokens come first."""
        tokenizer = self.service.tokenizer
        texts, token_logprobs, top_logprobs, offsets = [], [], [], []
        ids = [*(prompt if prompt_logprobs else ()), *token_ids]
        for token_id, entry in zip(ids, [*prompt_logprobs, *logprobs], strict=True):
            own = entry[token_id] if entry else None
            text = own.decoded_token if own else None
            if text is None:
                text = str(tokenizer.decode([token_id]))
            texts.append(text)
            token_logprobs.append(own.logprob if own else None)
            top_logprobs.append(partial(_logprobs_by_text, entry) if entry else None)
            offsets.append(self._offsets[choice])
            added = self._decoders[choice].decode(token_bytes(tokenizer, token_id, text))
            self._offsets[choice] += len(added)
        return {
            "tokens": texts,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


def _logprobs_by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    """Return logprobs keyed by text; of tokens with the same text, the most likely is kept."""
    logprobs: dict[str, float] = {}
    for logprob in sorted(entry.values(), key=lambda each: each.rank):
        logprobs.setdefault(logprob.decoded_token or "", logprob.logprob)
    return logprobs
