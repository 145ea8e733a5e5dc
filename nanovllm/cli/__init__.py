"""The `nanovllm` command: one file per subcommand, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nanovllm import __version__
from nanovllm.cli import (
    batch,
    bench_latency,
    bench_serve,
    chat,
    generate,
    models,
    serve,
    trace,
)
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import HELP_FORMAT, Commands, add_command, dashed
from nanovllm.cli.start import configure_logging

EXAMPLES = """\
examples:
  nanovllm chat                                      talk to the default model
  nanovllm generate "Why is the sky blue?"           answer a question
  nanovllm generate --raw "The capital of France is" continue a text
  nanovllm generate "Summarise this:" < report.txt   answer about a text
  nanovllm generate --lines --json < questions.txt   answer every line of a file
  nanovllm serve --port 8000                         answer requests over HTTP
  nanovllm batch questions.jsonl -o answers.jsonl    answer a file of any size
  nanovllm bench latency                             measure this machine
  nanovllm models                                    list what can be loaded

`nanovllm COMMAND --help` explains every option."""


BENCH = "Measure this machine, or a server. The repository has more in bench.py and benchmarks/."
BENCH_EXAMPLES = """\
examples:
  nanovllm bench latency --batch 1 64                generate, by batch size
  nanovllm bench serve --url http://127.0.0.1:8000   what clients of a server wait for"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong usage."""
    arguments = dashed(sys.argv[1:] if argv is None else argv) or ["--help"]
    return exit_code(lambda: run(parse(arguments)), "nanovllm")


def parse(arguments: list[str]) -> argparse.Namespace:
    if arguments[0] in ("serve", "batch"):
        arguments = serve.with_config_file(arguments)
    args, unknown = build_parser().parse_known_args(arguments)
    unknown = [each for each in unknown if not serve.is_off(each, args)]
    if unknown:  # by the parser of the command, whose name then begins the error
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose, getattr(args, "log_level", None), "log_level" in args)
    return exit_code(lambda: int(args.run(args)), args.parser.prog)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm",
        usage="nanovllm [--help] [--version] COMMAND ...",
        description="A small, readable and fast LLM inference engine.",
        epilog=EXAMPLES,
        formatter_class=HELP_FORMAT,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="nanovllm"
    )
    generate.add_parser(commands)
    chat.add_parser(commands)
    serve.add_parser(commands)
    batch.add_parser(commands)
    add_bench(commands)
    trace.add_parser(commands)
    models.add_parser(commands)
    return parser


def add_bench(commands: Commands) -> None:
    usage = "nanovllm bench NAME [options]"
    parser = add_command(commands, "bench", "measure speed", usage, BENCH, BENCH_EXAMPLES)
    names = parser.add_subparsers(
        title="benchmarks", metavar="NAME", required=True, prog="nanovllm bench"
    )
    bench_latency.add_parser(names)
    bench_serve.add_parser(names)
