"""`nanovllm bench serve`: what users of an OpenAI server wait for, under a load of requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nanovllm.bench.load import (
    Limits,
    Load,
    Measured,
    random_prompts,
    read_prompts,
    run_load,
    summary,
    table,
    waits,
)
from nanovllm.bench.plot import draw
from nanovllm.bench.report import check_writable
from nanovllm.cli.options import Commands, add_command, add_server_options, at_least
from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError

DESCRIPTION = """\
Send requests to a server with OpenAI's API and measure what users wait for: from sending to the
first token, from each piece of an answer to the next, and to its end. Requests come at random
(a Poisson process) with --rate, or as soon as another one ends with --concurrency; with both, no
more than that many are under way. Answers are streamed; nothing but the standard API is used."""

EXAMPLES = """\
examples:
  nanovllm bench serve --concurrency 64 --num-requests 512
  nanovllm bench serve --rate 10 --goodput-first-token-ms 500 --goodput-inter-token-ms 50
  nanovllm bench serve --shared-words 1000 --prompt-words 1100 --json result.json --plot result.svg
  nanovllm bench serve --url https://example.com/v1 --api-key KEY --prompts chats.jsonl"""

SENDING_SECONDS = 20.0  # unless it is said how many requests to send


def add_parser(names: Commands) -> None:
    about, usage = "measure a server with OpenAI's API under load", "nanovllm bench serve [options]"
    parser = add_command(names, "serve", about, usage, DESCRIPTION, EXAMPLES)
    add_server_options(parser, url="http://127.0.0.1:8000")
    add = parser.add_argument
    add("-v", "--verbose", action="store_true", help="tell more (default: at a terminal)")
    add("--model", metavar="NAME", help="to ask for (default: the server's first)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    _add_load_options(parser)
    _add_result_options(parser)
    parser.set_defaults(run=run, parser=parser)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument_group("load").add_argument, at_least(1)
    text = "requests a second (default: as fast as they end)"
    add("--rate", "--request-rate", type=float, metavar="X", help=text)
    text = "most under way at once (default: 16 without --rate, else any number)"
    add("--concurrency", "--max-concurrency", type=count, metavar="N", help=text)
    text = "how many to send (default: all of --prompts, or 128, or as many as a slow server takes"
    text += f" in {SENDING_SECONDS:.0f} seconds)"
    add("--num-requests", "--num-prompts", type=count, metavar="N", help=text)
    add("--max-tokens", type=count, default=128, metavar="N", help="of an answer (default: 128)")
    text = "words of a random prompt (default: %(default)s)"
    add("--prompt-words", type=count, default=256, metavar="N", help=text)
    text = "words with which all random prompts begin (default: %(default)s)"
    add("--shared-words", type=at_least(0), default=0, metavar="N", help=text)
    text = 'a file with a JSON object per line, "messages" or "prompt" (default: random prompts)'
    add("--prompts", metavar="FILE", help=text)


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    names = {"first-token": "to the first token", "inter-token": "between tokens, on average"}
    for name, text in {**names, "end-to-end": "to the last token"}.items():
        text = f"most milliseconds {text}, to count as goodput (default: any)"
        add(f"--goodput-{name}-ms", type=float, metavar="X", help=text)
    add("--json", metavar="FILE", help="write the result and every request (default: no file)")
    add("--plot", metavar="FILE", help="draw the distributions as SVG (default: no file)")


def run(args: argparse.Namespace) -> int:
    if args.rate is not None and not args.rate > 0:
        raise ConfigError(f"--rate must be more than 0, got {args.rate}")
    check_writable(args.json)
    check_writable(args.plot)
    concurrency = args.concurrency or (16 if args.rate is None else None)
    load = Load(args.rate, concurrency, args.max_tokens, args.seed)
    measured: list[Measured] = []
    is_interrupted = False
    try:
        asyncio.run(_run(args, load, measured.append))
    except KeyboardInterrupt:
        is_interrupted = True  # the requests that have ended are reported
    in_seconds = [
        None if each is None else each / 1000
        for each in (
            args.goodput_first_token_ms,
            args.goodput_inter_token_ms,
            args.goodput_end_to_end_ms,
        )
    ]
    result = summary(measured, Limits(*in_seconds))
    print(table(result))
    if args.json is not None:
        requests = [asdict(one) for one in sorted(measured, key=lambda one: one.sent)]
        record = {"load": asdict(load), "limits": in_seconds, **result, "requests": requests}
        Path(args.json).write_text(json.dumps(record) + "\n", encoding="utf-8")
    if args.plot is not None:
        Path(args.plot).write_text(draw(waits(measured)), encoding="utf-8")
    if is_interrupted:
        raise KeyboardInterrupt
    return 1 if result["num_failed"] else 0


async def _run(args: argparse.Namespace, load: Load, on_done: Callable[[Measured], object]) -> None:
    client = OpenAIClient(args.url, args.api_key, max_connections=None)  # the load decides
    prompts = read_prompts(args.prompts) if args.prompts else []
    number = args.num_requests or len(prompts) or 128
    seconds = math.inf if args.num_requests or prompts else SENDING_SECONDS
    if prompts:
        prompts = [prompts[index % len(prompts)] for index in range(number)]
    else:
        prompts = random_prompts(number, args.prompt_words, args.shared_words, args.seed)
    model = args.model or await client.model()
    num_done = 0

    def count(measured: Measured) -> None:
        nonlocal num_done
        on_done(measured)
        num_done += 1
        if sys.stderr.isatty():
            print(f"\r{num_done} of {number}", end="", file=sys.stderr, flush=True)

    try:
        await run_load(client, model, prompts, load, count, seconds)
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
