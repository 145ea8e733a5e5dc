"""Complete any number of prompts; more prompts are read as earlier ones finish."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from nanovllm.engine.engine_thread import EngineThread, RequestGroup
from nanovllm.engine.output_processor import RequestState
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


def run_lazily(
    engine: EngineThread,
    prompts: Iterable[Any],
    params: SamplingParams | Iterable[SamplingParams] | None,
    cache_salt: str | None,
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield the index and output of each prompt as it finishes."""

    def take(count: int) -> dict[int, RequestState]:
        requests = {}
        for index, (item, own) in itertools.islice(pairs, count):
            try:
                requests[index] = engine.prepare(item, own, cache_salt)
            except RequestError as error:
                raise RequestError(f"prompts[{index}]: {error}") from error
            indices[requests[index].seq_id] = index
        return requests

    pairs = enumerate(_with_params(prompts, params))
    indices: dict[int, int] = {}  # seq_id -> index of the prompt
    group = RequestGroup(is_streaming=True)
    # Keep as many requests waiting as can run, so that the batch stays full.
    steps = engine.stream(group, take(2 * engine.config.max_num_seqs))
    with contextlib.closing(steps):
        for step in steps:
            if step.finished:
                engine.extend(group, take(len(step.finished)))
            for output in step.finished:
                yield indices.pop(output.seq_id), output


def _with_params(
    prompts: Iterable[Any], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Any, SamplingParams]]:
    """Pair each prompt with its parameters; a string or a dict is one prompt."""
    prompts = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
    params = SamplingParams() if params is None else params
    each = itertools.repeat(params) if isinstance(params, SamplingParams) else iter(params)
    for index, prompt in enumerate(prompts):
        own = next(each, None)
        if not isinstance(own, SamplingParams):
            raise RequestError(
                "sampling_params must be one SamplingParams, or one for each prompt, got "
                f"{own!r:.80} for prompts[{index}]"
            )
        yield prompt, own
