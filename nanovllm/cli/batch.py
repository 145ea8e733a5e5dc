"""Process every row of a JSONL or Parquet file. A row is in OpenAI's batch format, or it has a
"prompt" or "messages" and optional sampling parameters; any other fields are copied to the output.
If the model has a chat template, a "prompt" is sent as a user message; with --raw it is continued
as text. Rows that fail go to OUTPUT.errors.jsonl. To resume a job that was stopped or killed, run
the same command again: no row is lost or written twice. Engine options are those of
`nanovllm serve`.

The exit status is 0 if every row succeeded, 1 if some rows failed and 2 if all of them did.

examples:
  nanovllm batch questions.jsonl -o answers.jsonl
  nanovllm batch Qwen/Qwen3-8B batch.jsonl -o answers.jsonl --max-model-len 8k
  nanovllm batch batch.jsonl -o answers.jsonl --model Qwen/Qwen3-8B --ray
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import Commands, add_command, add_model_argument, at_least
from nanovllm.cli.serve import add_model_options, engine_config, server_options
from nanovllm.cli.start import set_child_threads
from nanovllm.errors import ConfigError, NanovllmError

if TYPE_CHECKING:
    from nanovllm.batch.batch_engine import RowEngine, RowOptions
    from nanovllm.batch.progress_file import ProgressFile
    from nanovllm.batch.ray_batch import RayEngine

SECONDS_BETWEEN_LINES = 30.0  # time between progress lines if stderr is not a terminal
# Settings that affect the output; other options may change when a job is resumed.
SETTINGS = (
    *("revision", "dtype", "load_format", "max_model_len", "seed", "max_tokens", "raw"),
    *("quantization", "kv_cache_dtype", "tool_call_parser", "reasoning_parser"),
    *("served_model_name", "generation_config", "override_generation_config"),
)


def add_parser(commands: Commands) -> None:
    about, usage = "process a file of any size", "nanovllm batch [MODEL] INPUT -o OUTPUT [options]"
    parser = add_command(commands, "batch", about, usage, __doc__ or "")
    add = parser.add_argument
    add_model_argument(parser)
    add("input", type=Path, metavar="INPUT", help="a .jsonl or .parquet file")
    add("-o", "--output", type=Path, required=True, help="a .jsonl file; rows are in any order")
    text = "maximum output tokens of rows that set no limit (default: the API's default)"
    add("--max-tokens", type=at_least(1), metavar="N", help=text)
    text = 'continue the text of "prompt" rows instead of applying the chat template'
    add("--raw", action="store_true", help=text)
    add("--overwrite", action="store_true", help="start over, replacing existing output")
    add = parser.add_argument_group("cluster").add_argument
    text = "run engines on the Ray cluster at this address (without one: the cluster that this"
    text += " machine belongs to); 'local' starts a cluster on this machine"
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help=text)
    text = "engines on the cluster, each with a GPU for every rank (default: as many as fit)"
    add("--ray-replicas", type=at_least(1), metavar="N", help=text)
    add_model_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from nanovllm.batch.batch_engine import RowOptions
    from nanovllm.batch.progress_file import ProgressFile
    from nanovllm.batch.rows import scan

    if args.ray_replicas is not None and args.ray is None:
        raise ConfigError("--ray-replicas needs --ray")
    if args.threads is not None and args.ray is not None:
        raise ConfigError("--threads applies to this machine only; leave it out with --ray")
    config = engine_config(args)
    set_child_threads(args.threads, config)
    server = server_options(args, config.model, {})  # read files here: engines may run elsewhere
    scanned = scan(args.input)
    for path in (Path(f"{args.output}{suffix}") for suffix in ("", ".errors.jsonl", ".job.json")):
        if path.exists() and path.samefile(args.input):
            raise ConfigError(f"{path} is the input; choose another file for the output")
    settings = {name: getattr(args, name) for name in SETTINGS}
    # On resume, files are compared by content, not by path.
    settings |= {"model": config.model, "input": scanned.digest}
    settings["chat_template"] = server.chat_template
    if args.generation_config not in ("auto", "vllm"):
        settings["generation_config"] = server.sampling_defaults
    options = RowOptions(config, server, args.max_tokens, args.raw)
    progress_file = ProgressFile(args.output, settings, scanned.num_rows, args.overwrite)
    try:
        if progress_file.num_done < scanned.num_rows:
            asyncio.run(_process_rows(args, options, progress_file))
    except (KeyboardInterrupt, NanovllmError):
        print("Run the same command again to resume.", file=sys.stderr)
        raise
    finally:
        progress_file.close()
    num_errors, num_rows = progress_file.num_errors, scanned.num_rows
    errors = f", {num_errors} failed (see {progress_file.errors})" if num_errors else ""
    print(f"{num_rows - num_errors} of {num_rows} rows completed in {args.output}{errors}",
          file=sys.stderr)  # fmt: skip
    return 0 if not num_errors else 1 if num_errors < num_rows else 2


async def _process_rows(
    args: argparse.Namespace, options: RowOptions, progress_file: ProgressFile
) -> None:
    """Process the remaining rows, with a progress bar that shows the rate and the time left."""
    from tqdm import tqdm

    from nanovllm.batch.batch_engine import RowEngine
    from nanovllm.batch.run_batch import run_job

    max_concurrency, num_tokens, start = options.max_concurrency, 0, time.perf_counter()
    engine: RowEngine | RayEngine
    if args.ray is None:
        engine = RowEngine(options)
    else:
        engine, num_engines = _ray_engine(args, options)
        max_concurrency *= num_engines
    bar = tqdm(
        total=len(progress_file.is_done),
        initial=progress_file.num_done,
        unit="row",
        mininterval=0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES,
        dynamic_ncols=True,
    )

    def show(line: dict[str, Any] | None) -> None:
        nonlocal num_tokens
        line = line or {}
        usage = line.get("usage") or line.get("response", {}).get("body", {}).get("usage") or {}
        num_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        rate = num_tokens / (time.perf_counter() - start)
        bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        bar.update()

    try:
        with bar:
            await run_job(args.input, progress_file, engine, max_concurrency, show)
    finally:
        engine.close()


def _ray_engine(args: argparse.Namespace, options: RowOptions) -> tuple[RayEngine, int]:
    try:
        from nanovllm.batch.ray_batch import RayEngine, place_engines
        from nanovllm.parallel.ray_workers import connect
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ray needs Ray ({error}): pip install 'nanovllm[ray]'") from error
    if options.config.distributed_executor_backend == "ray":
        raise ConfigError("--ray places engines itself; leave out --distributed-executor-backend")
    connect(args.ray)
    placement = place_engines(options.config, args.ray_replicas)
    return RayEngine(options, placement), placement.num_engines
