"""Run a workload through the engine's own step loop, and time it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.bench.workloads import Workload
from nanovllm.errors import ConfigError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float  # from the first prompt handed over to the last token
    first_token_seconds: float  # mean over the prompts
    decode_seconds: float  # from the step that gave the last prompt its first token, to the end
    num_decode_steps: int  # in that time
    num_cached_tokens: int  # prompt tokens that an earlier prompt had left in the cache


def measure(llm: LLM, workload: Workload, repeats: int) -> list[Timing]:
    """Time `repeats` passes after one that warms up; none finds another's prompts in the cache."""
    return [run_once(llm, workload, uuid.uuid4().hex) for _ in range(repeats + 1)][1:]


def run_once(llm: LLM, workload: Workload, cache_salt: str) -> Timing:
    check_fits(llm, workload)
    start = time.perf_counter()
    add_workload(llm, workload, cache_salt)
    outputs: list[RequestOutput] = []
    num_left, num_steps, decode_start = workload.num_prompt_tokens, 0, start
    engine = llm.engine  # itself: what passes between threads is not to be measured
    while not engine.is_finished():
        step = engine.step()
        outputs += step.finished
        if num_left > 0:  # a prompt still waits for its first token
            num_left -= step.num_prefill_tokens
            decode_start = time.perf_counter()
        elif step.num_decode_tokens:
            num_steps += 1
    end = time.perf_counter()
    num_new_tokens = sum(len(output.token_ids) for output in outputs)
    assert num_new_tokens == workload.num_new_tokens, "an answer has the wrong length"
    first_token = sum(output.time_to_first_token for output in outputs) / len(outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return Timing(end - start, first_token, end - decode_start, num_steps, num_cached)


def add_workload(llm: LLM, workload: Workload, cache_salt: str) -> None:
    for prompt, max_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True)
        llm.engine.add_request(prompt, params, cache_salt=cache_salt)


def check_fits(llm: LLM, workload: Workload) -> None:
    """Sequences that are cut short would be measured as if they had been cheap."""
    limit, longest = llm.engine.core.max_len, max(workload.total_lens)
    if longest > limit:
        raise ConfigError(
            f"the workload has a sequence of {longest} tokens, but the engine ends them "
            f"at {limit}: raise --max-model-len, or choose a model or a pool that holds more"
        )
