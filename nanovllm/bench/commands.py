"""The benchmarks: each builds a workload, times it and yields it beside its floor."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from nanovllm.bench.floors import Rates, decode_floor, model_cost, prefill_floor
from nanovllm.bench.report import Result
from nanovllm.bench.runner import Count, Passes, Timing, run_arrivals, run_once
from nanovllm.bench.workloads import Workload, mixed, mixed_name, shared_prefix, uniform
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class Bench:
    """An engine, and what its floors are counted from."""

    def __init__(self, llm: LLM, rates: Rates | None, passes: Passes) -> None:
        config = llm.engine.model_config
        self.llm, self.passes = llm, passes
        self.vocab_size = config.vocab_size
        is_quantised = llm.engine.config.quantization is not None  # floors count plain weights
        self._has_floors = rates is not None and not is_quantised
        self._rates = rates or Rates()
        itemsize = 4 if llm.engine.info.dtype == "float32" else 2
        self._cost = model_cost(config, itemsize, llm.engine.config.kv_cache_dtype)

    def measure(self, workload: Workload) -> list[Timing]:
        return self.passes.run(
            [workload], lambda salt, count: run_once(self.llm, workload, salt, count)
        )

    def prefill_floor(self, workload: Workload, num_cached: int = 0) -> float:
        return prefill_floor(self._cost, self._rates, workload.prompt_lens, num_cached)

    def decode_floor(self, workload: Workload) -> float:
        return decode_floor(self._cost, self._rates, workload)

    def result(
        self, case: str, unit: str, runs: list[float], floor: float, timings: Sequence[Timing]
    ) -> Result:
        """A result; without rates, or of quantised weights, it has no floor."""
        first_token = statistics.median(timing.first_token_seconds for timing in timings)
        return Result(case, unit, runs, floor if self._has_floors else None, 1000 * first_token)


Benchmark = Callable[[argparse.Namespace, Bench], Iterator[Result]]


def throughput(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """New tokens per second, over requests of mixed lengths that arrive all at once."""
    workload = once = mixed(bench.vocab_size, args.num_seqs, args.max_len, args.max_len)
    name = mixed_name(args.num_seqs, args.max_len, args.max_len)
    if args.samples_of is not None:
        one = uniform(bench.vocab_size, 1, args.samples_of, args.max_len)
        workload = Workload(one.prompts * args.num_seqs, one.max_tokens * args.num_seqs)
        # The floor: the prompt is computed once, and its keys are read for one of the samples.
        once = Workload([*one.prompts, *[[0]] * (args.num_seqs - 1)], workload.max_tokens)
        name = f"samples-{args.num_seqs}-{args.samples_of}-{args.max_len}"
    num_tokens = workload.num_new_tokens
    print(f"{'prompts':<14}{args.num_seqs}, {workload.num_prompt_tokens:,} tokens", flush=True)
    timings = bench.measure(workload)
    seconds = statistics.median(timing.seconds for timing in timings)
    speed = num_tokens / seconds
    print(f"Total: {num_tokens}tok, Time: {seconds:.2f}s, Throughput: {speed:.2f}tok/s")
    yield bench.result(
        name,
        "tok/s",
        [num_tokens / timing.seconds for timing in timings],
        num_tokens / (bench.prefill_floor(once) + bench.decode_floor(once)),
        timings,
    )


def latency(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Milliseconds per decode step, at each batch size."""
    is_usual = (args.prompt_len, args.new_tokens) == (128, None)
    for num_seqs in args.batch:
        new_tokens = args.new_tokens or (512 if num_seqs == 1 else 256)
        workload = uniform(bench.vocab_size, num_seqs, args.prompt_len, new_tokens)
        timings = bench.measure(workload)
        name = f"bs{num_seqs}" if is_usual else f"bs{num_seqs}-{args.prompt_len}-{new_tokens}"
        steps = [1000 * timing.decode_seconds / timing.num_decode_steps for timing in timings]
        floor = 1000 * bench.decode_floor(workload) / (new_tokens - 1)
        yield bench.result(name, "ms/step", steps, floor, timings)


def prefill(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Prompt tokens per second: one new token each."""
    workload = uniform(bench.vocab_size, args.num_seqs, args.prompt_len, 1)
    timings = bench.measure(workload)
    is_usual = (args.num_seqs, args.prompt_len) == (64, 2048)
    name = "prefill" if is_usual else f"prefill-{args.num_seqs}-{args.prompt_len}"
    num_tokens = workload.num_prompt_tokens
    runs = [num_tokens / timing.seconds for timing in timings]
    yield bench.result(name, "tok/s", runs, num_tokens / bench.prefill_floor(workload), timings)


def prefix(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Time to the first token of a prompt, and of one that shares its first tokens with it."""
    for prefix_len in args.prefix_len:
        pair = shared_prefix(bench.vocab_size, prefix_len)

        def both(salt: str, count: Count, pair: tuple[Workload, ...] = pair) -> list[Timing]:
            """The second prompt of a pass finds the first, and no other."""
            return [run_once(bench.llm, workload, salt, count) for workload in pair]

        passes = bench.passes.run(pair, both)
        for name, timings in zip(("cold", "cached"), zip(*passes, strict=True), strict=True):
            runs = [1000 * timing.first_token_seconds for timing in timings]
            floor = 1000 * bench.prefill_floor(pair[0], timings[0].num_cached_tokens)
            yield bench.result(f"{name}-{prefix_len}", "ms", runs, floor, timings)


def arrivals(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Milliseconds that users wait for tokens, while requests arrive at random."""
    import numpy as np  # which --help does without

    workload = uniform(bench.vocab_size, args.num_seqs, args.prompt_len, args.new_tokens)
    passes = bench.passes.run(
        [workload], lambda salt, count: run_arrivals(bench.llm, workload, args.rate, salt, count)
    )
    if not all(waits.next for waits in passes):
        raise ConfigError("no answer got two tokens before the last request: raise --num-seqs")
    first_token = 1000 * statistics.median(passes[0].first)
    for name, waits in (
        ("ttft", [waits.first for waits in passes]),
        ("itl", [waits.next for waits in passes]),
    ):
        for percent in (50, 99):
            runs = [1000 * float(np.percentile(seconds, percent)) for seconds in waits]
            yield Result(f"{name}-p{percent}@{args.rate:g}", "ms", runs, None, first_token)
