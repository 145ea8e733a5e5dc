"""Run a workload through the engine's own step loop, and time it."""

from __future__ import annotations

import itertools
import math
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.bench.workloads import Workload
from nanovllm.errors import ConfigError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

TEMPERATURE = 0.6
Pass = TypeVar("Pass")
Count = Callable[[int], object]  # told how many tokens a step ran


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float  # from the first prompt handed over to the last token
    first_token_seconds: float  # mean over the prompts
    decode_seconds: float  # from the step that gave the last prompt its first token, to the end
    num_decode_steps: int  # in that time
    num_cached_tokens: int  # prompt tokens that an earlier prompt had left in the cache


@dataclass(slots=True)
class Passes:
    """Repeats a measurement with a progress bar; Ctrl-C ends it with the passes done so far."""

    repeats: int
    deadline: float = math.inf  # of time.perf_counter: afterwards one pass is enough
    is_interrupted: bool = False

    def run(self, workloads: Sequence[Workload], one: Callable[[str, Count], Pass]) -> list[Pass]:
        """Return up to `repeats` passes after one that warms up.

        None finds another's prompts in the cache: each has a salt of its own.
        """
        from tqdm import tqdm

        if self.is_interrupted:  # in the measurement before this one
            raise KeyboardInterrupt
        passes: list[Pass] = []
        num_tokens = sum(sum(workload.total_lens) for workload in workloads)
        total = num_tokens * (self.repeats + 1)
        with tqdm(total=total, unit="tok", disable=None, leave=False) as bar:
            try:
                for number in range(self.repeats + 1):
                    if number < 2 or time.perf_counter() < self.deadline:
                        passes.append(one(uuid.uuid4().hex, bar.update))
            except KeyboardInterrupt:
                bar.leave = True  # the rate so far
                self.is_interrupted = True
                if len(passes) < 2:
                    raise
        return passes[1:]


def run_once(
    llm: LLM, workload: Workload, cache_salt: str, count: Count = lambda _: None, **asked: Any
) -> Timing:
    """Time a pass; `asked` is what every request asks for beside the usual."""
    check_fits(llm, workload)
    start = time.perf_counter()
    add_workload(llm, workload, cache_salt, **asked)
    outputs: list[RequestOutput] = []
    num_left, num_steps, decode_start = workload.num_prompt_tokens, 0, start
    engine = llm.engine  # itself: what passes between threads is not to be measured
    while not engine.is_finished():
        step = engine.step()
        count(step.num_prefill_tokens + step.num_decode_tokens)
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


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds from arrival to the first token, and from each token to the next."""

    first: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)


def run_arrivals(
    llm: LLM, workload: Workload, rate: float, cache_salt: str, count: Count = lambda _: None
) -> Waits:
    """Let `rate` requests a second arrive at random, and answer them all.

    What comes after the last arrival does not count: by then fewer and fewer answers run.
    """
    check_fits(llm, workload)
    rng, engine, waits = random.Random(0), llm.engine, Waits()
    due = list(itertools.accumulate(rng.expovariate(rate) for _ in workload.prompts))
    arrived: dict[int, float] = {}
    newest: dict[int, float] = {}  # when each got its newest token
    start = time.perf_counter()
    while len(arrived) < len(due) or not engine.is_finished():
        now = time.perf_counter() - start
        while len(arrived) < len(due) and due[len(arrived)] <= now:
            seq_id = _add(llm, workload, len(arrived), cache_salt, is_streaming=True)
            arrived[seq_id] = due[len(arrived)]
        if engine.is_finished():
            time.sleep(due[len(arrived)] - now)
            continue
        step = engine.step()
        count(step.num_prefill_tokens + step.num_decode_tokens)
        pieces = step.pieces
        now = time.perf_counter() - start
        for seq_id in (piece.seq_id for piece in pieces if now <= due[-1]):
            times = waits.next if seq_id in newest else waits.first
            times.append(now - newest.get(seq_id, arrived[seq_id]))
            newest[seq_id] = now
    return waits


def add_workload(llm: LLM, workload: Workload, cache_salt: str, **asked: Any) -> None:
    for index in range(len(workload.prompts)):
        _add(llm, workload, index, cache_salt, **asked)


def _add(
    llm: LLM,
    workload: Workload,
    index: int,
    cache_salt: str,
    is_streaming: bool = False,
    **asked: Any,
) -> int:
    prompt, max_tokens = workload.prompts[index], workload.max_tokens[index]
    usual = {"temperature": TEMPERATURE, "max_tokens": max_tokens, "ignore_eos": True}
    params = SamplingParams(**(usual | asked))
    return llm.engine.add_request(prompt, params, cache_salt=cache_salt, is_streaming=is_streaming)


def check_fits(llm: LLM, workload: Workload) -> None:
    """Sequences that are cut short would be measured as if they had been cheap."""
    limit, longest = llm.engine.core.max_len, max(workload.total_lens)
    if longest > limit:
        raise ConfigError(
            f"the workload has a sequence of {longest} tokens, but the engine ends them "
            f"at {limit}: raise --max-model-len, or choose a model or a pool that holds more"
        )
