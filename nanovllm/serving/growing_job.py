"""A job whose prompts are read while it runs, so that there may be any number of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from nanovllm.engine.front import Live
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serving.engine_thread import EngineThread, Job

Prepare = Callable[[Any, SamplingParams], Live]


def answers_of(
    thread: EngineThread,
    prepare: Prepare,
    prompts: Iterable[Any],
    params: SamplingParams | Iterable[SamplingParams] | None,
    room: int,
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield the index and the output of each prompt as it finishes; `room` are under way."""
    one = SamplingParams() if params is None else params
    each = itertools.repeat(one) if isinstance(one, SamplingParams) else one
    numbered = enumerate(zip(prompts, each, strict=False))
    requests = _take(numbered, prepare, room)
    indices = {live.seq_id: index for index, live in requests.items()}
    job = Job(requests, is_streaming=True, is_open=len(requests) == room)
    with contextlib.closing(thread.stream(job)) as steps:
        for step in steps:
            if step.finished and job.is_open:
                more = _take(numbered, prepare, len(step.finished))
                indices |= {live.seq_id: index for index, live in more.items()}
                thread.extend(job, more, is_open=len(more) == len(step.finished))
            job.outputs.clear()  # which would grow without end
            for output in step.finished:
                yield indices.pop(output.seq_id), output


def _take(
    numbered: Iterator[tuple[int, tuple[Any, SamplingParams]]], prepare: Prepare, count: int
) -> dict[int, Live]:
    requests = {}
    for index, (prompt, params) in itertools.islice(numbered, count):
        try:
            requests[index] = prepare(prompt, params)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}") from error
    return requests
