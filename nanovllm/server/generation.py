"""The answers to the prompts of one request, as they come: every API's are made of these."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.front import BROKEN
from nanovllm.errors import GrammarError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, about
from nanovllm.server.parsing.events import BlockEvent
from nanovllm.server.service import Service

Logprobs = Sequence[dict[int, Logprob]]
MAX_AHEAD = 16  # pieces of one request that wait to be written


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that are answered together: choice i is sample i % n of prompt i // n."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]  # of each prompt
    cache_salt: str | None = None
    is_streaming: bool = False
    grammar_param: str = "structured_outputs"  # the field of the request that has the grammar

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params[0].n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str
    stop_reason: str | int | None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    num_cached_tokens: int  # of the prompt; 0 for all but its first sample


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of one choice; its last update has `finish`."""

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    finish: Finish | None = None
    events: Sequence[BlockEvent] = ()  # of a chat: its text, parsed
    num_reasoning_tokens: int = 0  # counted by the last update of a chat


class Usage:
    """Counts the tokens of a request."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0

    def add(self, update: Update) -> None:
        self.num_completion_tokens += len(update.token_ids)
        self.num_reasoning_tokens += update.num_reasoning_tokens
        if update.finish is not None:
            self.num_cached_tokens += update.finish.num_cached_tokens

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


async def generate(service: Service, job: Job) -> AsyncGenerator[Update, None]:
    """Answer all prompts at once; leaving the iterator aborts what is left."""
    num_samples = job.params[0].n
    with service.counted(job.num_choices):
        async with contextlib.aclosing(_pieces(service, job)) as pieces:
            async for prompt, piece in pieces:
                first = prompt * num_samples
                if job.is_streaming:
                    logprobs = piece.logprobs
                    if piece.text or piece.token_ids:
                        yield Update(first + piece.sample, piece.text, piece.token_ids, logprobs)
                if piece.output is not None:
                    for output in piece.output.outputs:
                        finish = _finish(piece.output, output)
                        choice = first + output.index
                        if job.is_streaming:
                            yield Update(choice, finish=finish)
                        else:
                            yield Update(
                                choice, output.text, output.token_ids, output.logprobs, finish
                            )


def _finish(answer: RequestOutput, output: CompletionOutput) -> Finish:
    if answer.error is not None:
        is_broken = answer.error in (BROKEN.format("logits"), BROKEN.format("hidden states"))
        raise ApiError(answer.error, 500 if is_broken else 400)
    num_cached = answer.num_cached_tokens if output.index == 0 else 0
    return Finish(output.finish_reason, output.stop_reason, answer.prompt_logprobs, num_cached)


async def _pieces(service: Service, job: Job) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    """Pieces of all prompts, each with the number of its prompt."""
    try:
        async with contextlib.aclosing(_all_pieces(service, job)) as pieces:
            async for piece in pieces:
                yield piece
    except GrammarError as error:
        raise about(job.grammar_param, error) from error


async def _all_pieces(service: Service, job: Job) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    streams = [
        service.metrics.observed(
            service.llm.generate(
                prompt, params, cache_salt=job.cache_salt, is_streaming=job.is_streaming
            ),
            params.n,
        )
        for prompt, params in zip(job.prompts, job.params, strict=True)
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
            number, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                num_open -= 1
            else:
                yield number, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    pieces: AsyncGenerator[StreamPiece, None],
    queue: asyncio.Queue[tuple[int, StreamPiece | Exception | None]],
) -> None:
    """Hand on all pieces, then None, or the error that ended them."""
    end: Exception | None = None
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                await queue.put((number, piece))
    except Exception as error:  # whatever it is, the reader raises it
        end = error
    await queue.put((number, end))
