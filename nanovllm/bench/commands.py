"""The benchmarks: each builds a workload, times it and yields it beside its floor."""

from __future__ import annotations

import argparse
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.bench.floors import Rates, decode_floor, model_cost, prefill_floor
from nanovllm.bench.models import model_path
from nanovllm.bench.options import rates
from nanovllm.bench.report import Result, Setup, append, json_line
from nanovllm.bench.runner import Timing, measure, run_arrivals, run_once
from nanovllm.bench.workloads import Workload, mixed, shared_prefix, uniform
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class Bench:
    """An engine with random weights, and what its floors are counted from."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        info = llm.engine.info
        self.llm = llm
        self.setup = Setup(
            args.model, info.device, info.dtype, rates(args, info.device_name), args.enforce_eager
        )
        self.vocab_size = llm.engine.model_config.vocab_size
        self._cost = model_cost(llm.engine.model_config, 4 if info.dtype == "float32" else 2)
        self._rates = self.setup.rates or Rates()

    def prefill_floor(self, workload: Workload, num_cached: int = 0) -> float:
        return prefill_floor(self._cost, self._rates, workload.prompt_lens, num_cached)

    def decode_floor(self, workload: Workload) -> float:
        return decode_floor(self._cost, self._rates, workload)

    def result(
        self, case: str, unit: str, runs: list[float], floor: float, timings: Sequence[Timing]
    ) -> Result:
        """A result; without rates there is no floor to hold it against."""
        first_token = statistics.median(timing.first_token_seconds for timing in timings)
        return Result(case, unit, runs, floor if self.setup.rates else None, 1000 * first_token)


Benchmark = Callable[[argparse.Namespace, Bench], Iterator[Result]]


def run(benchmark: Benchmark, args: argparse.Namespace) -> int:
    """Start the engine, then print, and keep if asked, each result as it comes."""
    if args.json:
        append(args.json, "")  # a file that cannot be written is better known before than after
    # As many as the benchmark wants to see side by side, and no fewer than engines have by default.
    num_samples = args.num_seqs if getattr(args, "samples_of", None) else 0
    max_num_seqs = max([512, num_samples, *getattr(args, "batch", [])])
    target = getattr(args, "target_inter_token_ms", None)
    with open_llm(args, max_num_seqs=max_num_seqs, target_inter_token_ms=target) as llm:
        bench = Bench(llm, args)
        print(bench.setup.heading(), flush=True)
        for result in benchmark(args, bench):
            print(result.line(), flush=True)
            if args.json:
                append(args.json, json_line(bench.setup, result))
        if num_preemptions := llm.engine.core.scheduler.num_preemptions:
            print(f"{num_preemptions} preemptions: the KV cache is too small for this workload")
    return 0


def open_llm(args: argparse.Namespace, **options: float | None) -> LLM:
    """Start an engine with random weights; torch is imported here and not before."""
    from nanovllm.llm import LLM

    return LLM(
        model_path(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
        **options,
    )


def throughput(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """New tokens per second, over requests of mixed lengths that arrive all at once."""
    workload = mixed(bench.vocab_size, args.num_seqs, args.max_len)
    is_usual = (args.num_seqs, args.max_len) == (256, 1024)
    name = "nano" if is_usual else f"nano-{args.num_seqs}-{args.max_len}"
    once = workload  # what must be read and computed at least
    if args.samples_of is not None:
        one = uniform(bench.vocab_size, 1, args.samples_of, args.max_len)
        workload = Workload(one.prompts * args.num_seqs, one.max_tokens * args.num_seqs)
        once = Workload([*one.prompts, *[[0]] * (args.num_seqs - 1)], workload.max_tokens)
        name = f"samples-{args.num_seqs}-{args.samples_of}-{args.max_len}"
    num_tokens = workload.num_new_tokens
    print(f"{'prompts':<14}{args.num_seqs}, {workload.num_prompt_tokens:,} tokens", flush=True)
    timings = measure(bench.llm, workload, args.repeats)
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
        timings = measure(bench.llm, workload, args.repeats)
        yield bench.result(
            f"bs{num_seqs}" if is_usual else f"bs{num_seqs}-{args.prompt_len}-{new_tokens}",
            "ms/step",
            [1000 * timing.decode_seconds / timing.num_decode_steps for timing in timings],
            1000 * bench.decode_floor(workload) / (new_tokens - 1),
            timings,
        )


def prefill(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Prompt tokens per second: one new token each."""
    workload = uniform(bench.vocab_size, args.num_seqs, args.prompt_len, 1)
    num_tokens = workload.num_prompt_tokens
    timings = measure(bench.llm, workload, args.repeats)
    is_usual = (args.num_seqs, args.prompt_len) == (64, 2048)
    yield bench.result(
        "prefill" if is_usual else f"prefill-{args.num_seqs}-{args.prompt_len}",
        "tok/s",
        [num_tokens / timing.seconds for timing in timings],
        num_tokens / bench.prefill_floor(workload),
        timings,
    )


def prefix(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Time to the first token of a prompt, and of one that shares its first tokens with it."""
    for prefix_len in args.prefix_len:
        pair = shared_prefix(bench.vocab_size, prefix_len)
        passes = []
        for _ in range(args.repeats + 1):
            salt = uuid.uuid4().hex  # the second prompt of a pass finds the first, and no other
            passes.append([run_once(bench.llm, workload, salt) for workload in pair])
        for name, timings in zip(("cold", "cached"), zip(*passes[1:], strict=True), strict=True):
            runs = [1000 * timing.first_token_seconds for timing in timings]
            floor = 1000 * bench.prefill_floor(pair[0], timings[0].num_cached_tokens)
            yield bench.result(f"{name}-{prefix_len}", "ms", runs, floor, timings)


def arrivals(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Milliseconds that users wait for tokens, while requests arrive at random."""
    workload = uniform(bench.vocab_size, args.num_seqs, args.prompt_len, args.new_tokens)
    salts = [uuid.uuid4().hex for _ in range(args.repeats + 1)]
    passes = [run_arrivals(bench.llm, workload, args.rate, salt) for salt in salts][1:]
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
