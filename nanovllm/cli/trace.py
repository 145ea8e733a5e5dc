"""Record the engine steps of a running `nanovllm serve` for a few seconds: host phases (schedule,
submit, wait, commit), device time, and every request as a span. Open the file at
https://ui.perfetto.dev or chrome://tracing.

examples:
  nanovllm trace --seconds 5 --out trace.json
  nanovllm trace --url http://127.0.0.1:8001 --api-key secret
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from nanovllm.cli.options import Commands, add_command, add_server_options, positive
from nanovllm.errors import file_errors
from nanovllm.serve.client import OpenAIClient


def add_parser(commands: Commands) -> None:
    about, usage = "record a trace of a server's engine", "nanovllm trace [options]"
    parser = add_command(commands, "trace", about, usage, __doc__ or "")
    add = parser.add_argument
    add_server_options(parser, url="http://127.0.0.1:8000")
    text = "duration in seconds (default: %(default)s)"
    add("--seconds", type=positive, default=3.0, metavar="X", help=text)
    add("--out", default="trace.json", metavar="FILE", help="output file (default: %(default)s)")
    add("-v", "--verbose", action="store_true", help="log more (default: only at a terminal)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    client = OpenAIClient(args.url, args.api_key)
    trace = asyncio.run(client.get(f"/trace?seconds={args.seconds:g}", args.seconds + 60))
    with file_errors("write", args.out):
        Path(args.out).write_text(json.dumps(trace), encoding="utf-8")
    num_steps = sum(event["name"] == "submit" for event in trace["traceEvents"])
    print(f"{args.out}: {num_steps} steps; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
