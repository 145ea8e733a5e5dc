"""Run and time a workload in the engine's step loop."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models import model_path
from benchmarks.workloads import Workload
from nanovllm import LLM, SamplingParams
from nanovllm.cli.options import engine_config
from nanovllm.cli.start import load_llm
from nanovllm.errors import ConfigError
from nanovllm.outputs import RequestOutput

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float  # from submitting the first prompt to the last token
    first_token_seconds: float  # mean over the prompts
    decode_seconds: float  # from the step in which the last prompt got its first token to the end
    num_decode_steps: int  # steps within decode_seconds
    num_cached_tokens: int  # prompt tokens found in the prefix cache


@contextlib.contextmanager
def open_llm(args: argparse.Namespace, has_tokenizer: bool = False) -> Iterator[LLM]:
    """Start an engine, by default without a tokenizer; the model may be a name in configs/."""
    config = engine_config(args)
    path = model_path(config.model)
    config = replace(config, model=path, skip_tokenizer_init=not has_tokenizer)
    with load_llm(config, args.threads) as llm:
        yield llm


def run_once(llm: LLM, workload: Workload, cache_salt: str, **params: Any) -> Timing:
    """Time one pass; `params` are additional sampling parameters of every request."""
    check_fits(llm, workload)
    start = time.perf_counter()
    add_workload(llm, workload, cache_salt, **params)
    outputs: list[RequestOutput] = []
    num_left, num_steps, decode_start = workload.num_prompt_tokens, 0, start
    engine = llm.added  # step it directly: passing results between threads is not measured
    while not engine.is_finished():
        step = engine.step()
        outputs += step.finished
        if num_left > 0:  # prefill is not finished
            num_left -= step.num_prefill_tokens
            decode_start = time.perf_counter()
        elif step.num_decode_tokens:
            num_steps += 1
    end = time.perf_counter()
    num_new_tokens = sum(len(output.token_ids) for output in outputs)
    assert num_new_tokens == workload.num_new_tokens, "an output has the wrong length"
    first_token = sum(output.time_to_first_token for output in outputs) / len(outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return Timing(end - start, first_token, end - decode_start, num_steps, num_cached)


def add_workload(llm: LLM, workload: Workload, cache_salt: str, **params: Any) -> None:
    usual = {"temperature": TEMPERATURE, "ignore_eos": True}
    for prompt, max_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
        own = SamplingParams(**(usual | params), max_tokens=max_tokens)
        llm.added.submit(llm.engine.prepare(prompt, own, cache_salt=cache_salt))


def check_fits(llm: LLM, workload: Workload) -> None:
    """Raise ConfigError if a sequence would be truncated, which would look like a fast run."""
    limit, longest = llm.engine.core.max_len, max(workload.total_lens)
    if longest > limit:
        raise ConfigError(
            f"the workload has a sequence of {longest} tokens, but the engine ends them "
            f"at {limit}: raise --max-model-len, or choose a model or KV cache that holds more"
        )
