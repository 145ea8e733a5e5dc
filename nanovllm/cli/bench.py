"""`nanovllm bench`: how fast the engine is here, and how fast it could be."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from nanovllm.bench import commands as benchmarks
from nanovllm.bench.floors import Rates, rates_of
from nanovllm.bench.models import model_names, model_path
from nanovllm.bench.report import Setup, check_writable, keep
from nanovllm.bench.runner import Passes
from nanovllm.cli import bench_serve
from nanovllm.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_model_argument,
    at_least,
    engine_config,
    model_of,
)
from nanovllm.cli.start import load_llm
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.llm import LLM

DESCRIPTION = f"""\
Measure the engine with random weights in a real model's shapes. Nothing is downloaded for
{", ".join(model_names())};
of a folder, a file or a hub id only the config is read. Each number is the median of some passes
after a warm-up, and stands beside its physical floor: the bytes that must be read and the
operations that must be done, at the rates the device is known to sustain. The engine is stepped
directly: what passes between a caller's thread and its own is left out.

On a CPU the default is the built-in model and sizes that take less than a minute on two cores; a
slower one makes fewer passes. Ctrl-C ends a benchmark with the passes that are done."""
CPU_SECONDS = 20.0  # after which no more passes begin, unless --repeats says how many

EXAMPLES = """\
examples:
  nanovllm bench throughput                          256 requests of mixed lengths
  nanovllm bench latency --batch 1 64                one decode step, by batch size
  nanovllm bench prefill qwen3-8b                    reading prompts
  nanovllm bench prefix                              prompts that begin alike
  nanovllm bench arrivals --rate 40                  requests that come at random
  nanovllm bench serve --url http://127.0.0.1:8000   a server's users, over HTTP

`nanovllm bench NAME --help` explains what is measured and every option."""

THROUGHPUT = """\
Hand over all requests at once and count new tokens per second until the last is done. The usual 256
requests have 142,827 prompt tokens and 133,966 new ones; lengths run from 100 to 1,024, so that the
batch shrinks towards the end as it does in use. Other numbers of requests are named in the result.

The floor takes all prompts in one step, then decodes all requests together."""

LATENCY = """\
Time decode steps: N prompts of 128 tokens, 256 new tokens each (512 where N is 1), from the step in
which the last prompt got its first token to the end, divided by the steps in between. To compare
engines, bench.py divides whole runs, prompts included."""

PREFILL = """\
Count prompt tokens per second: 64 prompts of 2,048 tokens and one new token each."""

PREFIX = """\
Time the first token of a prompt that the engine has never seen (cold), then of another that shares
all but its last 20 tokens (cached), for some lengths of the shared part."""

ARRIVALS = """\
Let requests arrive at random (a Poisson process) and take percentiles of what users wait: from
arrival to the first token (ttft), and from each token to the next, until the last request has come
(itl). Prompts delay the answers that run beside them: --target-inter-token-ms sets how far."""


def add_parser(commands: Commands) -> None:
    usage = "nanovllm bench NAME [options]"
    text = "measure speed, with random weights"
    parser = add_command(commands, "bench", text, usage, DESCRIPTION, EXAMPLES)
    names = parser.add_subparsers(
        title="benchmarks", metavar="NAME", required=True, prog="nanovllm bench"
    )
    samples = "throughput --num-seqs 1024 --max-num-seqs 1024 --samples-of 1000 --max-len 256"
    examples = ["throughput qwen3-8b --json results.jsonl", samples]
    parser = _add_benchmark(names, benchmarks.throughput, THROUGHPUT, examples)
    _add_count(parser, ["--num-seqs", "--num-prompts"], 256, 8, "requests")
    _add_count(parser, ["--max-len"], 1024, 64, "longest prompt and longest answer, in tokens")
    text = "make all requests samples of one prompt of N tokens, with answers of --max-len"
    text += " (default: each has its own prompt)"
    parser.add_argument("--samples-of", type=at_least(1), metavar="N", help=text)

    examples = ["latency --batch 1 64", "latency --prompt-len 2000 --new-tokens 100"]
    parser = _add_benchmark(names, benchmarks.latency, LATENCY, examples)
    sizes = [1, 8, 64, 256]
    _add_count(parser, ["--batch", "--batch-size"], sizes, [1, 4], "how many prompts run at once")
    _add_count(parser, ["--prompt-len", "--input-len"], 128, 64, "tokens in a prompt")
    text = "tokens in an answer (default: 256, but 512 where one prompt runs alone; on a CPU 64)"
    parser.add_argument("--new-tokens", "--output-len", type=at_least(2), metavar="N", help=text)
    parser.get_default("sizes")["new_tokens"] = (None, 64)

    examples = ["prefill", "prefill --num-seqs 2 --prompt-len 8192 --max-model-len 8200"]
    parser = _add_benchmark(names, benchmarks.prefill, PREFILL, examples)
    _add_count(parser, ["--num-seqs", "--num-prompts"], 64, 4, "prompts")
    _add_count(parser, ["--prompt-len", "--input-len"], 2048, 256, "tokens in a prompt")

    examples = ["prefix", "prefix --prefix-len 500 --device cpu"]
    parser = _add_benchmark(names, benchmarks.prefix, PREFIX, examples)
    sizes = [1000, 2000, 4000]
    _add_count(parser, ["--prefix-len"], sizes, [256, 512], "tokens that both prompts share")

    examples = ["arrivals qwen3-8b --rate 40 --target-inter-token-ms 25"]
    parser = _add_benchmark(names, benchmarks.arrivals, ARRIVALS, examples)
    _add_count(parser, ["--rate", "--request-rate"], 10, 2, "requests a second")
    _add_count(parser, ["--num-seqs", "--num-prompts"], 400, 16, "requests")
    _add_count(parser, ["--prompt-len", "--input-len"], 512, 64, "tokens in a prompt")
    _add_count(parser, ["--new-tokens", "--output-len"], 128, 16, "tokens in an answer")
    bench_serve.add_parser(names)


def run(args: argparse.Namespace) -> int:
    """Start the engine, then print, and keep if asked, each result as it comes."""
    check_writable(args.json)
    _set_defaults(args)
    _check_options(args)
    # As many as the benchmark wants to see side by side, and no fewer than engines have by default.
    args.max_num_seqs = max([args.max_num_seqs, *getattr(args, "batch", [])])
    with open_llm(args) as llm:
        info = llm.engine.info
        rates = rates_of(info.device_name, args.bandwidth, args.tflops)
        options = args.enforce_eager, args.kv_cache_dtype
        setup = Setup(model_of(args), info.device, info.dtype, rates, *options)
        print(setup.heading(), flush=True)
        passes = Passes(args.repeats, time.perf_counter() + args.max_seconds)
        bench = benchmarks.Bench(llm, rates, passes)
        for result in args.benchmark(args, bench):
            print(result.line(), flush=True)
            keep(args.json, **asdict(result), **asdict(setup))
        if bench.passes.is_interrupted:
            raise KeyboardInterrupt
        if num_preemptions := llm.engine.core.scheduler.num_preemptions:
            print(f"{num_preemptions} preemptions: the KV cache is too small for this workload")
    return 0


def _set_defaults(args: argparse.Namespace) -> None:
    """Choose the model and the sizes that are left to the device."""
    from nanovllm.devices.cuda.memory import has_cuda  # imports torch

    is_cpu = args.device == "cpu" or not has_cuda()
    args.default_model = "smollm2" if is_cpu else "qwen3-0.6b"
    is_asked = args.repeats != args.parser.get_default("repeats")
    args.max_seconds = CPU_SECONDS if is_cpu and not is_asked else math.inf
    for name, sizes in args.sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, sizes[is_cpu])


def _check_options(args: argparse.Namespace) -> None:
    """Refuse an engine that cannot do what is to be measured."""
    num_seqs, most = args.max_num_seqs, max(getattr(args, "batch", [1]))
    if num_seqs < most and num_seqs != args.parser.get_default("max_num_seqs"):
        raise ConfigError(f"--max-num-seqs {num_seqs} is too few for --batch {most}")
    if args.benchmark is benchmarks.prefix and not args.enable_prefix_caching:
        raise ConfigError("--no-prefix-caching leaves nothing to measure here; leave it out")


@contextlib.contextmanager
def open_llm(args: argparse.Namespace) -> Iterator[LLM]:
    """Start an engine that takes and gives token ids."""
    config = engine_config(args)
    config = replace(config, model=model_path(config.model), skip_tokenizer_init=True)
    with load_llm(config, args.threads) as llm:
        yield llm


def add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    text = "timed passes after a warm-up; their median counts (default: %(default)s)"
    add("--repeats", type=at_least(1), default=3, metavar="N", help=text)
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")
    title = "floor (of an H200; elsewhere there is one if both are given)"
    add = parser.add_argument_group(title).add_argument
    bandwidth, tflops = (rate / 1e12 for rate in asdict(Rates()).values())
    text = f"TB/s that memory sustains (default: on an H200, {bandwidth:g})"
    add("--bandwidth", type=float, metavar="X", help=text)
    text = f"TFLOP/s that products sustain (default: on an H200, {tflops:g})"
    add("--tflops", type=float, metavar="X", help=text)


def _add_benchmark(
    names: Commands, benchmark: benchmarks.Benchmark, description: str, examples: list[str]
) -> argparse.ArgumentParser:
    name, examples = benchmark.__name__, ["examples:", *examples]
    usage, epilog = f"nanovllm bench {name} [MODEL] [options]", "\n  nanovllm bench ".join(examples)
    parser = add_command(names, name, benchmark.__doc__ or "", usage, description, epilog)
    add_model_argument(parser)
    add_engine_options(parser, default_model=None, load_format="dummy")
    add_result_options(parser)
    parser.set_defaults(run=run, benchmark=benchmark, parser=parser, sizes={})
    return parser


def _add_count(
    parser: argparse.ArgumentParser,
    flags: list[str],
    default: int | list[int],
    cpu_default: int | list[int],
    text: str,
) -> None:
    shown = [" ".join(map(str, each if isinstance(each, list) else [each]))
             for each in (default, cpu_default)]  # fmt: skip
    action = parser.add_argument(
        *flags,
        type=at_least(1),
        nargs="+" if isinstance(default, list) else None,
        metavar="N",
        help=f"{text} (default: {shown[0]}, on a CPU {shown[1]})",
    )
    parser.get_default("sizes")[action.dest] = (default, cpu_default)
