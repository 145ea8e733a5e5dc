"""A small, readable and fast LLM inference engine.

examples:
  nanovllm chat                                      chat with the default model
  nanovllm generate "Why is the sky blue?"           complete a prompt
  nanovllm serve --port 8000                         serve requests over HTTP
  nanovllm batch questions.jsonl -o answers.jsonl    process a file of any size
  nanovllm bench latency                             benchmark this machine
  nanovllm models                                    list the supported models
  nanovllm models pull qwen3                         download a model

`nanovllm COMMAND --help` explains every option.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm import __version__
from nanovllm.cli import (
    batch,
    bench_latency,
    bench_serve,
    bench_throughput,
    chat,
    generate,
    models,
    serve,
    trace,
)
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import HELP_FORMAT, add_command, dashed
from nanovllm.cli.start import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, as `exit_code` defines it."""
    arguments = dashed(sys.argv[1:] if argv is None else argv) or ["--help"]
    return exit_code(lambda: run(parse(arguments)), "nanovllm")


def parse(arguments: Sequence[str], options: Mapping[str, Any] | None = None) -> Namespace:
    """Parse a command line; `options` or a --config file supply the options that it omits."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # the command's own parser puts the command's name into the error
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options is None and getattr(args, "config", None):
        options = serve.read_config(args.config)
    if options:
        serve.set_options(args.parser, options)
        args = parser.parse_args(arguments)
    if getattr(args, "demo", False):
        serve.set_options(args.parser, {**serve.DEMO, **(options or {})})
        args = parser.parse_args(arguments)
    return args


def run(args: Namespace) -> int:
    configure_logging(args.verbose, getattr(args, "log_level", None), "log_level" in args)
    return exit_code(lambda: int(args.run(args)), args.parser.prog)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="nanovllm",
        usage="nanovllm [--help] [--version] COMMAND ...",
        description=__doc__,
        formatter_class=HELP_FORMAT,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="nanovllm"
    )
    for command in (generate, chat, serve, batch, trace, models):
        command.add_parser(commands)
    usage, about = "nanovllm bench NAME [options]", "benchmark this machine or a server"
    examples = "examples:\n  nanovllm bench latency --batch 1 64\n  nanovllm bench serve"
    bench = add_command(commands, "bench", about, usage, examples)
    names = bench.add_subparsers(metavar="NAME", required=True, prog="nanovllm bench")
    for benchmark in (bench_latency, bench_throughput, bench_serve):
        benchmark.add_parser(names)
    return parser
