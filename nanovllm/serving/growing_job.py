"""A job whose prompts are read while it runs, so that there may be any number of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from nanovllm.engine.front import Live
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import as_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving.engine_thread import EngineThread, Job


def answers_of(
    thread: EngineThread,
    prompts: Iterable[Any],
    params: SamplingParams | Iterable[SamplingParams] | None,
    cache_salt: str | None,
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield the index and the output of each prompt as it finishes."""
    take = functools.partial(_take, thread.engine, cache_salt)
    room = 2 * thread.engine.config.max_num_seqs  # as many wait as run
    numbered = enumerate(_with_params(prompts, SamplingParams() if params is None else params))
    requests = take(numbered, room)
    indices = {live.seq_id: index for index, live in requests.items()}
    job = Job(requests, is_streaming=True, is_open=len(requests) == room)
    with contextlib.closing(thread.stream(job)) as steps:
        for step in steps:
            if step.finished and job.is_open:
                more = take(numbered, len(step.finished))
                indices |= {live.seq_id: index for index, live in more.items()}
                thread.extend(job, more, is_open=len(more) == len(step.finished))
            job.outputs.clear()  # which would grow without end
            for output in step.finished:
                yield indices.pop(output.seq_id), output


def _with_params(
    prompts: Iterable[Any], params: SamplingParams | Iterable[SamplingParams]
) -> Iterator[tuple[Any, SamplingParams]]:
    """A text or a dict is one prompt, as for `generate`, and not its letters or keys."""
    several = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    each = itertools.repeat(params) if isinstance(params, SamplingParams) else iter(params)
    for index, prompt in enumerate(several):
        own = next(each, None)
        if not isinstance(own, SamplingParams):
            raise RequestError(
                "sampling_params must be SamplingParams or one for each prompt, got "
                f"{own!r:.80} for prompts[{index}]"
            )
        yield prompt, own


def _take(
    engine: LLMEngine,
    cache_salt: str | None,
    numbered: Iterator[tuple[int, tuple[Any, SamplingParams]]],
    count: int,
) -> dict[int, Live]:
    requests = {}
    for index, (item, params) in itertools.islice(numbered, count):
        try:
            prompt = as_prompt(item, cache_salt)
            requests[index] = engine.prepare(prompt.content, params, cache_salt=prompt.cache_salt)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}") from error
    return requests
