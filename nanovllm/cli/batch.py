"""`nanovllm batch`: answer every row of a file; killed and started again, it goes on."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import Commands, add_command, add_model_argument, at_least
from nanovllm.cli.serve import (
    add_model_options,
    engine_config,
    read_chat_template,
    read_sampling_defaults,
)
from nanovllm.cli.start import set_child_threads
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, NanovllmError

if TYPE_CHECKING:
    from nanovllm.jobs.engine import RowEngine, RowOptions
    from nanovllm.jobs.ledger import Ledger
    from nanovllm.jobs.rows import Scan
    from nanovllm.ray.jobs import RayEngine

DESCRIPTION = """\
Answer every row of a JSONL or Parquet file: OpenAI's batch format, or rows with a "prompt" or
"messages", fields of sampling, and whatever else should come back with the answer. A "prompt" is
put to a model with a chat template as a user's message; with --raw it is continued. Rows that
cannot be answered go to OUTPUT.errors.jsonl. Stopped or killed, it goes on when it is started
again: no row is lost or answered twice. Engine options are those of `nanovllm serve`.

The exit status is 0 if every row was answered, 1 if some rows failed and 2 if all of them did."""

EXAMPLES = """\
examples:
  nanovllm batch questions.jsonl -o answers.jsonl
  nanovllm batch Qwen/Qwen3-8B batch.jsonl -o answers.jsonl --max-model-len 8k
  nanovllm batch batch.jsonl -o answers.jsonl --model Qwen/Qwen3-8B --ray"""

TOKEN_COUNTS = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
SECONDS_BETWEEN_LINES = 30.0  # of progress, where they go to a file
# What an answer depends on; the rest of the options may change between one start and the next.
SETTINGS = (
    *("model", "revision", "dtype", "load_format", "max_model_len", "seed", "max_tokens"),
    *("quantization", "kv_cache_dtype", "tool_call_parser", "reasoning_parser"),
    "served_model_name",
)


def add_parser(commands: Commands) -> None:
    about, usage = "answer a file of any size", "nanovllm batch [MODEL] INPUT -o OUTPUT [options]"
    parser = add_command(commands, "batch", about, usage, DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add_model_argument(parser)
    add("input", type=Path, metavar="INPUT", help="a .jsonl or .parquet file")
    add("-o", "--output", type=Path, required=True, help="a .jsonl file, in any order of rows")
    add("--max-tokens", type=at_least(1), metavar="N",
        help="of answers to rows that do not say (default: as the API has it)")  # fmt: skip
    add("--raw", action="store_true",
        help='continue the text of "prompt" rows, without the chat template')  # fmt: skip
    add("--overwrite", action="store_true", help="begin anew whatever there is of the output")
    add("--config", metavar="FILE", help="a YAML file with options; those given here come first")
    _add_ray_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run, parser=parser)


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("cluster").add_argument
    add("--ray", nargs="?", const="auto", metavar="ADDRESS",
        help="answer rows with engines on a Ray cluster: the one that runs here, or the one at "
        "this address; 'local' starts one on this machine")  # fmt: skip
    add("--ray-replicas", type=at_least(1), metavar="N",
        help="engines on the cluster, each with a GPU for every rank (default: as many as "
        "there is room for)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from nanovllm.jobs.ledger import Ledger
    from nanovllm.jobs.rows import scan

    if args.ray_replicas is not None and args.ray is None:
        raise ConfigError("--ray-replicas needs --ray")
    if args.threads is not None and args.ray is not None:
        raise ConfigError("--threads is for this machine; leave it out with --ray")
    config = engine_config(args)
    set_child_threads(args.threads, config)
    found = scan(args.input)
    for path in (Path(f"{args.output}{suffix}") for suffix in ("", ".errors.jsonl", ".job.json")):
        if path.exists() and path.samefile(args.input):
            raise ConfigError(f"{path} is the input; answers need a file of their own")
    options = _row_options(args, config)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"model": config.model, "input": found.digest}
    # Of files what they hold, not where they are.
    settings["chat_template"] = options.server.chat_template
    settings["generation_config"] = options.sampling_defaults or args.generation_config
    if args.override_generation_config:
        settings["override_generation_config"] = args.override_generation_config
    if not args.raw:  # a job from before there was the option continues with --raw alone
        settings["raw"] = False
    ledger = Ledger(args.output, settings, found.num_rows, args.overwrite)
    progress = Progress(found, ledger)
    try:
        if ledger.num_done < found.num_rows:
            asyncio.run(_answer_all(args, options, ledger, progress))
    except (KeyboardInterrupt, NanovllmError):
        progress.close()
        print("The same command again goes on from here.", file=sys.stderr)
        raise
    finally:
        ledger.close()
    progress.close()
    progress.print_summary()
    if not ledger.num_errors:
        return 0
    return 2 if ledger.num_errors == found.num_rows else 1


async def _answer_all(
    args: argparse.Namespace, options: RowOptions, ledger: Ledger, progress: Progress
) -> None:
    from nanovllm.jobs.engine import RowEngine
    from nanovllm.jobs.run import run_job

    num_at_once = options.num_at_once
    engine: RowEngine | RayEngine
    if args.ray is None:
        engine = RowEngine(options)
    else:
        engine, num_engines = _ray_engine(args, options)
        num_at_once *= num_engines
    try:
        await run_job(args.input, ledger, engine, num_at_once, progress.add)
    finally:
        engine.close()


def _row_options(args: argparse.Namespace, config: EngineConfig) -> RowOptions:
    """Read all that this machine has in files: an engine may be on another one."""
    from nanovllm.jobs.engine import RowOptions
    from nanovllm.server.options import ServerOptions

    server = ServerOptions(
        model_names=tuple(args.served_model_name or [config.model]),
        chat_template=read_chat_template(args.chat_template),
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    where = args.generation_config
    defaults = None if where == "auto" else read_sampling_defaults(where, {})
    override = args.override_generation_config
    return RowOptions(config, server, defaults, override, args.max_tokens, args.raw)


def _ray_engine(args: argparse.Namespace, options: RowOptions) -> tuple[RayEngine, int]:
    try:
        from nanovllm.executor.ray_workers import connect
        from nanovllm.ray.jobs import RayEngine, find_room
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ray needs Ray ({error}): pip install 'nanovllm[ray]'") from error
    if options.config.distributed_executor_backend == "ray":
        raise ConfigError("--ray gives each engine a machine; leave --distributed-executor-backend")
    connect(args.ray)
    room = find_room(options.config, args.ray_replicas)
    return RayEngine(options, room), room.num_engines


class Progress:
    """A bar with the rate and the time left, and the figures of the summary."""

    def __init__(self, found: Scan, ledger: Ledger) -> None:
        from tqdm import tqdm

        self._found, self._ledger = found, ledger
        self._num_tokens = dict.fromkeys(TOKEN_COUNTS, 0)
        self._start = time.perf_counter()
        seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        self._bar = tqdm(
            total=found.num_rows,
            initial=ledger.num_done,
            unit="row",
            mininterval=seconds,
            dynamic_ncols=True,
        )

    def add(self, line: dict[str, Any] | None) -> None:
        usage: Mapping[str, int] = {}
        if line is not None:
            usage = line.get("usage") or line["response"]["body"].get("usage") or {}
        for name, in_responses in TOKEN_COUNTS.items():
            self._num_tokens[name] += usage.get(name, usage.get(in_responses, 0))
        rate = self._num_tokens["completion_tokens"] / (time.perf_counter() - self._start)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def print_summary(self) -> None:
        num_errors, tokens = self._ledger.num_errors, self._num_tokens
        errors = f", {num_errors} failed (see {self._ledger.errors})" if num_errors else ""
        print(
            f"{self._found.num_rows - num_errors} of {self._found.num_rows} rows answered in "
            f"{self._ledger.output}{errors}; this time {tokens['prompt_tokens']} prompt and "
            f"{tokens['completion_tokens']} answer tokens in "
            f"{time.perf_counter() - self._start:.1f} s",
            file=sys.stderr,
        )
