"""Generation for one HTTP request: a stream of updates that every API renders in its format."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from nanovllm.engine.images import PromptImage
from nanovllm.errors import GrammarError, RequestError, errors_about
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.http_responses import Event, EventStream
from nanovllm.serve.parsing.events import BlockEvent
from nanovllm.serve.service import Service

Logprobs = Sequence[dict[int, Logprob]]
MAX_AHEAD = 16  # maximum number of queued stream pieces of a request with several prompts


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The prompts of one request; choice i is sample i % n of prompt i // n."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]  # one per prompt
    cache_salt: str | None = None
    is_streaming: bool = False
    grammar_param: str = "structured_outputs"  # request field that grammar errors name
    # Creates the output parser of a choice; only chats have one.
    new_parser: Callable[[], Callable[[Update], None]] | None = None
    images: tuple[PromptImage, ...] = ()  # of the prompt; only chats have some

    def prompt(self, index: int) -> Any:
        """Return a prompt as `Model.generate` takes it."""
        ids = self.prompts[index]
        if not self.images:
            return ids
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": self.images}}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params[0].n


@dataclass(slots=True)  # not frozen, for speed (one per token), and because chats set `events`
class Update:
    """New output of a choice; only its last update sets `finish_reason` and the fields below."""

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    events: Sequence[BlockEvent] = ()  # `text` as content-block events; set for chats only
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0  # cached prompt tokens; set only for the prompt's first sample
    num_reasoning_tokens: int = 0
    # Draft tokens of all samples of the prompt; set only for its first sample.
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0


@dataclass(slots=True)
class Usage:
    """Counts the tokens of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    def add(self, update: Update) -> None:
        self.num_completion_tokens += len(update.token_ids)
        self.num_reasoning_tokens += update.num_reasoning_tokens
        self.num_cached_tokens += update.num_cached_tokens
        self.num_accepted_tokens += update.num_accepted_tokens
        self.num_rejected_tokens += update.num_rejected_tokens

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning_tokens,
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_rejected_tokens,
            },
        }


class ApiResponse(EventStream):
    """The completions of a request, rendered as events of one API."""

    def __init__(self, service: Service, job: GenerationJob) -> None:
        self.service, self.job = service, job
        self.usage = Usage(sum(map(len, job.prompts)))
        new_parser = job.new_parser
        self._parsers = [new_parser() for _ in range(job.num_choices)] if new_parser else []

    async def events(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(generate(self.service, self.job)) as updates:
            async for update in updates:
                if self._parsers:
                    self._parsers[update.choice](update)
                self.usage.add(update)
                for event in self.render(update):
                    yield event
        for event in self.last_events():
            yield event

    def render(self, update: Update) -> Iterable[Event]:
        """Return the events of an update; none if there is nothing new."""
        raise NotImplementedError

    def last_events(self) -> Iterable[Event]:
        """Return the events that follow the last update."""
        return ()


async def generate(service: Service, job: GenerationJob) -> AsyncGenerator[Update, None]:
    """Run all prompts of a job concurrently; closing the generator aborts unfinished ones."""
    num_samples = job.params[0].n
    with service.counted(job.num_choices), errors_about(job.grammar_param, GrammarError):
        async with contextlib.aclosing(_pieces(service, job)) as pieces:
            async for prompt, piece in pieces:
                if job.is_streaming and (piece.text or piece.token_ids):
                    choice = prompt * num_samples + piece.sample
                    yield Update(choice, piece.text, piece.token_ids, piece.logprobs)
                if piece.output is not None:
                    for output in piece.output.outputs:
                        yield _last_update(job, prompt, piece.output, output)


def _last_update(
    job: GenerationJob, prompt: int, request_output: RequestOutput, output: CompletionOutput
) -> Update:
    params = job.params[prompt]
    if request_output.error is not None:
        raise RequestError(request_output.error, status=400 if params.can_exclude_tokens else 500)
    update = Update(
        prompt * params.n + output.index,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        prompt_logprobs=request_output.prompt_logprobs,
    )
    if not job.is_streaming:
        update.text, update.token_ids = output.text, output.token_ids
        update.logprobs = output.logprobs
    if output.index == 0:
        for name in ("num_cached_tokens", "num_accepted_tokens", "num_rejected_tokens"):
            setattr(update, name, request_output[name])
    return update


async def _pieces(
    service: Service, job: GenerationJob
) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    """Yield the stream pieces of all prompts, each with the index of its prompt."""
    request_id = uuid4().hex  # the same for all prompts, which take turns with other requests
    streams = [
        service.metrics.observed(
            service.llm.generate(
                job.prompt(index),
                params,
                request_id=request_id,
                cache_salt=job.cache_salt,
                is_streaming=job.is_streaming,
            ),
            params.n,
        )
        for index, params in enumerate(job.params)
    ]
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, StreamPiece | Exception | None]] = asyncio.Queue(MAX_AHEAD)
    tasks = [asyncio.create_task(_pump(i, each, queue)) for i, each in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    pieces: AsyncGenerator[StreamPiece, None],
    queue: asyncio.Queue[tuple[int, StreamPiece | Exception | None]],
) -> None:
    """Queue all pieces, then None or the error that ended the stream."""
    end: Exception | None = None
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                await queue.put((index, piece))
    except Exception as error:  # re-raised by the reader of the queue
        end = error
    await queue.put((index, end))
