"""Compare engine steps to their floor: decode, cached prefixes, parallel samples.

    python -m benchmarks.engine.steps latency [--model qwen3-0.6b] [--batch 1 8 64 256]
    python -m benchmarks.engine.steps prefix [--prefix-len 1000 4000]
    python -m benchmarks.engine.steps samples [--num-seqs 1024 --max-num-seqs 1024]

The floor is a lower bound on the time (roofline model; see benchmarks/floors.py). Weights are
random, in the shapes of a real model. The engine is stepped directly, so that passing results
between threads is not measured; bench.py measures whole runs, including prefill.

latency: time per decode step of N prompts, from the step in which the last one got its first token
to the end. prefix: time to first token of a new prompt (cold), then of one that shares all but its
last 20 tokens (cached). samples: tokens per second of many requests with the same prompt; the floor
assumes that the prompt is computed once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.floors import (
    Rates,
    add_rate_options,
    decode_floor,
    model_cost,
    prefill_floor,
    rates_of,
)
from benchmarks.report.records import (
    add_result_options,
    check_writable,
    keep,
    number,
    versions_text,
)
from benchmarks.runner import Timing, open_llm, run_once
from benchmarks.workloads import Workload, shared_prefix, uniform
from nanovllm import LLM
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, at_least, dashed, model_of
from nanovllm.cli.start import configure_logging


@dataclass(frozen=True, slots=True)
class Result:
    case: str  # "bs64", "cold-1000", ...
    unit: str  # "tok/s" (higher is better), "ms" or "ms/step" (lower is better)
    runs: list[float]
    floor: float | None  # None if the device's rates are unknown or weights are quantized
    first_token_ms: float

    def line(self) -> str:
        value = statistics.median(self.runs)
        parts = [f"{self.case:<14}{number(value):>9} {self.unit:<8}"]
        if self.floor is not None:
            share = value / self.floor if self.unit == "tok/s" else self.floor / value
            parts.append(f"floor {number(self.floor):>7} ({share:.0%} of the floor's speed)")
        parts.append(f"runs {' '.join(map(number, self.runs))}")
        if self.unit != "ms":
            parts.append(f"first token after {number(self.first_token_ms)} ms")
        return "   ".join(parts)


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    check_writable(args.json)
    args.max_num_seqs = max([args.max_num_seqs, *getattr(args, "batch", [])])
    with open_llm(args) as llm:
        info = llm.engine.info
        rates = rates_of(info.device_name, args.bandwidth, args.tflops)
        floor = f"floor at {rates}" if rates else "floor unknown: see --bandwidth, --tflops"
        about = f"{info.dtype}, {args.kv_cache_dtype} KV cache, {info.device}, {versions_text()}"
        print(f"{model_of(args)}, {about}, {floor}", flush=True)
        setup = {"model": model_of(args), "device": info.device, "dtype": info.dtype}
        setup |= {"enforce_eager": args.enforce_eager, "kv_cache_dtype": args.kv_cache_dtype}
        for result in args.measure(args, Bench(llm, rates, args.repeats)):
            print(result.line(), flush=True)
            keep(args.json, **asdict(result), **setup, rates=rates and asdict(rates))
        if num_preemptions := llm.engine.core.scheduler.num_preemptions:
            print(f"{num_preemptions} preemptions: the KV cache is too small for this workload")
    return 0


class Bench:
    """An engine, and the costs and rates that determine the floors."""

    def __init__(self, llm: LLM, rates: Rates | None, repeats: int) -> None:
        config = llm.engine.model_config
        self.vocab_size = config.vocab_size
        self._llm, self._repeats = llm, repeats
        is_plain = llm.engine.config.quantization is None  # floors assume unquantized weights
        self._rates = rates if is_plain else None
        itemsize = 4 if llm.engine.info.dtype == "float32" else 2
        self._cost = model_cost(config, itemsize, llm.engine.config.kv_cache_dtype)

    def measure(self, *workloads: Workload) -> list[list[Timing]]:
        """Return a list of passes for each workload, without the warm-up pass.

        The workloads of a pass share a cache salt: in the prefix cache, they hit each other's
        prompts, but none of another pass.
        """
        passes = []
        for _ in range(self._repeats + 1):
            salt = uuid.uuid4().hex
            passes.append([run_once(self._llm, workload, salt) for workload in workloads])
        return [list(timings) for timings in zip(*passes[1:], strict=True)]

    def prefill_floor(self, workload: Workload, num_cached: int = 0) -> float:
        lens = workload.prompt_lens
        return prefill_floor(self._cost, self._rates or Rates(), lens, num_cached)

    def decode_floor(self, workload: Workload) -> float:
        return decode_floor(self._cost, self._rates or Rates(), workload)

    def result(
        self, case: str, unit: str, runs: list[float], floor: float, timings: Sequence[Timing]
    ) -> Result:
        first_token = 1000 * statistics.median(timing.first_token_seconds for timing in timings)
        return Result(case, unit, runs, None if self._rates is None else floor, first_token)


Measure = Callable[[argparse.Namespace, Bench], Iterator[Result]]


def latency(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Measure milliseconds per decode step at each batch size."""
    is_usual = (args.prompt_len, args.new_tokens) == (128, None)
    for num_seqs in args.batch:
        new_tokens = args.new_tokens or (512 if num_seqs == 1 else 256)
        workload = uniform(bench.vocab_size, num_seqs, args.prompt_len, new_tokens)
        [timings] = bench.measure(workload)
        name = f"bs{num_seqs}" if is_usual else f"bs{num_seqs}-{args.prompt_len}-{new_tokens}"
        steps = [1000 * timing.decode_seconds / timing.num_decode_steps for timing in timings]
        floor = 1000 * bench.decode_floor(workload) / (new_tokens - 1)
        yield bench.result(name, "ms/step", steps, floor, timings)


def prefix(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Measure the time to first token of a new prompt, and of one with a cached prefix."""
    for prefix_len in args.prefix_len:
        pair = shared_prefix(bench.vocab_size, prefix_len)
        for name, timings in zip(("cold", "cached"), bench.measure(*pair), strict=True):
            runs = [1000 * timing.first_token_seconds for timing in timings]
            floor = 1000 * bench.prefill_floor(pair[0], timings[0].num_cached_tokens)
            yield bench.result(f"{name}-{prefix_len}", "ms", runs, floor, timings)


def samples(args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Measure new tokens per second of many requests with the same prompt."""
    one = uniform(bench.vocab_size, 1, args.prompt_len, args.new_tokens)
    workload = Workload(one.prompts * args.num_seqs, one.max_tokens * args.num_seqs)
    # The floor computes the prompt once and reads its keys for only one of the samples.
    once = Workload([*one.prompts, *[[0]] * (args.num_seqs - 1)], workload.max_tokens)
    [timings] = bench.measure(workload)
    num_tokens = workload.num_new_tokens
    name = f"samples-{args.num_seqs}-{args.prompt_len}-{args.new_tokens}"
    speeds = [num_tokens / timing.seconds for timing in timings]
    floor = num_tokens / (bench.prefill_floor(once) + bench.decode_floor(once))
    yield bench.result(name, "tok/s", speeds, floor, timings)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, count = parser.add_subparsers(metavar="NAME", required=True), at_least(1)
    add = _add(names, latency)
    add("--batch", "--batch-size", type=count, nargs="+", default=[1, 8, 64, 256], metavar="N",
        help="batch sizes (default: 1 8 64 256)")  # fmt: skip
    add("--prompt-len", type=count, default=128, metavar="N", help="tokens (default: 128)")
    add("--new-tokens", type=at_least(2), metavar="N", help="(default: 256, 512 at batch 1)")
    add = _add(names, prefix)
    add("--prefix-len", type=count, nargs="+", default=[1000, 2000, 4000], metavar="N",
        help="tokens that both prompts share (default: 1000 2000 4000)")  # fmt: skip
    add = _add(names, samples)
    add("--num-seqs", type=count, default=1024, metavar="N", help="samples (default: 1024)")
    add("--prompt-len", type=count, default=1000, metavar="N", help="tokens (default: 1000)")
    add("--new-tokens", type=count, default=256, metavar="N", help="per sample (default: 256)")
    return parser.parse_args(dashed(sys.argv[1:]))


def _add(
    names: argparse._SubParsersAction[argparse.ArgumentParser], measure: Measure
) -> Callable[..., object]:
    parser = names.add_parser(measure.__name__, help=measure.__doc__)
    add_engine_options(parser, "qwen3-0.6b", load_format="dummy")
    add_result_options(parser)
    add_rate_options(parser)
    parser.set_defaults(measure=measure)
    return parser.add_argument


if __name__ == "__main__":
    sys.exit(exit_code(main))
