"""`nanovllm bench`: how fast the engine is here, and how fast it could be."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from nanovllm.bench.commands import (
    Benchmark,
    arrivals,
    latency,
    prefill,
    prefix,
    run,
    throughput,
)
from nanovllm.bench.options import (
    add_engine_options,
    add_floor_options,
    add_result_options,
    add_target_option,
    at_least,
)
from nanovllm.cli.options import HELP_FORMAT

DESCRIPTION = """\
Measure the engine with random weights in a real model's shapes: nothing is downloaded. Each number
is the median of some passes after a warm-up, and stands beside its physical floor: the bytes that
must be read and the operations that must be done, at the rates the device is known to sustain.
The engine is stepped directly: what passes between a caller's thread and its own is left out."""

EXAMPLES = """\
examples:
  nanovllm bench throughput                          256 requests of mixed lengths
  nanovllm bench latency --batch 1 64                one decode step, by batch size
  nanovllm bench prefill --model qwen3-8b            reading prompts
  nanovllm bench prefix                              prompts that begin alike
  nanovllm bench arrivals --rate 40                  requests that come at random
  nanovllm bench throughput --model smollm2 --num-seqs 16 --max-len 128     enough for a CPU

`nanovllm bench NAME --help` explains what is measured and every option."""

THROUGHPUT = """\
Hand over all requests at once and count new tokens per second until the last is done. The usual 256
requests have 142,827 prompt tokens and 133,966 new ones; lengths run from 100 to 1,024, so that the
batch shrinks towards the end as it does in use. Other numbers of requests are named in the result.

The floor takes all prompts in one step, then decodes all requests together."""

LATENCY = """\
Time decode steps: N prompts of 128 tokens, 256 new tokens each (512 where N is 1), from the step in
which the last prompt got its first token to the end, divided by the steps in between."""

PREFILL = """\
Count prompt tokens per second: 64 prompts of 2,048 tokens and one new token each."""

PREFIX = """\
Time the first token of a prompt that the engine has never seen (cold), then of another that shares
all but its last 20 tokens (cached), for some lengths of the shared part."""


ARRIVALS = """\
Let requests arrive at random (a Poisson process) and take percentiles of what users wait: from
arrival to the first token (ttft), and from each token to the next, until the last request has come
(itl). Prompts delay the answers that run beside them: --target-inter-token-ms sets how far."""


if TYPE_CHECKING:
    Names = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: Names) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed, with random weights",
        usage="nanovllm bench NAME [options]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HELP_FORMAT,
    )
    names = parser.add_subparsers(
        title="benchmarks", metavar="NAME", required=True, prog="nanovllm bench"
    )
    add_throughput(names)
    add_latency(names)
    add_prefill(names)
    add_prefix(names)
    add_arrivals(names)


def add_throughput(names: Names) -> None:
    examples = [
        "throughput --model qwen3-8b --json results.jsonl",
        "throughput --num-seqs 1024 --samples-of 1000 --max-len 256",
    ]
    parser = _add(names, "throughput", throughput, THROUGHPUT, examples)
    _add_count(parser, "--num-seqs", 256, "requests")
    _add_count(parser, "--max-len", 1024, "longest prompt and longest answer, in tokens")
    parser.add_argument(
        "--samples-of",
        type=at_least(1),
        metavar="N",
        help="requests that are all samples of one prompt of N tokens, with answers of --max-len",
    )


def add_latency(names: Names) -> None:
    examples = ["latency --batch 1 64", "latency --prompt-len 2000 --new-tokens 100"]
    parser = _add(names, "latency", latency, LATENCY, examples)
    _add_counts(parser, "--batch", [1, 8, 64, 256], "how many prompts run at once")
    _add_count(parser, "--prompt-len", 128, "tokens in a prompt")
    parser.add_argument(
        "--new-tokens",
        type=at_least(2),
        metavar="N",
        help="tokens in an answer (default: 256, but 512 where one prompt runs alone)",
    )


def add_prefill(names: Names) -> None:
    examples = ["prefill", "prefill --num-seqs 2 --prompt-len 8192 --max-model-len 8200"]
    parser = _add(names, "prefill", prefill, PREFILL, examples)
    _add_count(parser, "--num-seqs", 64, "prompts")
    _add_count(parser, "--prompt-len", 2048, "tokens in a prompt")


def add_prefix(names: Names) -> None:
    examples = ["prefix", "prefix --prefix-len 500 --device cpu"]
    parser = _add(names, "prefix", prefix, PREFIX, examples)
    _add_counts(parser, "--prefix-len", [1000, 2000, 4000], "tokens that both prompts share")


def add_arrivals(names: Names) -> None:
    examples = ["arrivals --model qwen3-8b --rate 40 --target-inter-token-ms 25"]
    parser = _add(names, "arrivals", arrivals, ARRIVALS, examples)
    _add_count(parser, "--rate", 10, "requests a second")
    _add_count(parser, "--num-seqs", 400, "requests")
    _add_count(parser, "--prompt-len", 512, "tokens in a prompt")
    _add_count(parser, "--new-tokens", 128, "tokens in an answer")
    add_target_option(parser)


def _add(
    names: Names, name: str, benchmark: Benchmark, description: str, examples: list[str]
) -> argparse.ArgumentParser:
    parser = names.add_parser(
        name,
        help=str(benchmark.__doc__),
        usage=f"nanovllm bench {name} [options]",
        description=description,
        epilog="\n  nanovllm bench ".join(["examples:", *examples]),
        formatter_class=HELP_FORMAT,
        allow_abbrev=False,
    )
    add_engine_options(parser)
    add_result_options(parser)
    add_floor_options(parser)
    parser.set_defaults(run=functools.partial(run, benchmark), parser=parser)
    return parser


def _add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    text += " (default: %(default)s)"
    parser.add_argument(name, type=at_least(1), default=default, metavar="N", help=text)


def _add_counts(parser: argparse.ArgumentParser, name: str, default: list[int], text: str) -> None:
    text += f" (default: {' '.join(map(str, default))})"
    parser.add_argument(name, type=at_least(1), nargs="+", default=default, metavar="N", help=text)
