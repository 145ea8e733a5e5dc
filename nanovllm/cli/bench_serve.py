"""`nanovllm bench serve`: what clients of an OpenAI server wait for, under a load of requests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from nanovllm.cli.options import (
    Commands,
    add_command,
    add_server_options,
    append_text,
    at_least,
    read_text,
    seconds,
)
from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError, NanovllmError

DESCRIPTION = """\
Send requests to a server with OpenAI's API and measure what its clients wait for: from sending to
the first token, from each piece of an answer to the next, and to its end. Requests come at random
(a Poisson process) with --rate, or as soon as another one ends with --concurrency; with both, no
more than that many are in flight. Answers are streamed."""

EXAMPLES = """\
examples:
  nanovllm bench serve --concurrency 64 --num-requests 512
  nanovllm bench serve --rate 10 --goodput-first-token-ms 500 --goodput-inter-token-ms 50
  nanovllm bench serve --url https://example.com/v1 --api-key KEY --prompts chats.jsonl"""

WORDS = "the engine reads a prompt in blocks and writes one token of every answer in each step"
LIMITS = ("first-token", "inter-token", "end-to-end")


@dataclass(frozen=True, slots=True)
class Measured:
    """One request: seconds from when it was sent."""

    sent: float  # since the load began
    first_token: float = 0.0
    gaps: tuple[float, ...] = ()  # between the pieces of its answer
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    def is_within(self, limits_ms: Sequence[float]) -> bool:
        """Whether the first token, the mean gap and the end came in time."""
        times = self.first_token, sum(self.gaps) / max(len(self.gaps), 1), self.seconds
        return all(1000 * each <= most for each, most in zip(times, limits_ms, strict=True))


def add_parser(names: Commands) -> None:
    about, usage = "measure a server with OpenAI's API", "nanovllm bench serve [options]"
    parser = add_command(names, "serve", about, usage, DESCRIPTION, EXAMPLES)
    add_server_options(parser, url="http://127.0.0.1:8000")
    add, count = parser.add_argument, at_least(1)
    add("--model", metavar="NAME", help="to ask for (default: the server's first)")
    text = "requests a second (default: as fast as they end)"
    add("--rate", "--request-rate", type=seconds(may_be_0=False), metavar="X", help=text)
    text = "most in flight at once (default: 16 without --rate, else any number)"
    add("--concurrency", "--max-concurrency", type=count, metavar="N", help=text)
    text = "how many to send (default: all of --prompts, or 64)"
    add("--num-requests", "--num-prompts", type=count, metavar="N", help=text)
    add("--max-tokens", type=count, default=128, metavar="N", help="of an answer (default: 128)")
    text = "words of a random prompt (default: %(default)s)"
    add("--prompt-words", type=count, default=256, metavar="N", help=text)
    text = "words with which all random prompts begin (default: %(default)s)"
    add("--shared-words", type=at_least(0), default=0, metavar="N", help=text)
    text = 'a file with a JSON object per line, "messages" or "prompt" (default: random prompts)'
    add("--prompts", metavar="FILE", help=text)
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    for name in LIMITS:
        text = f"longest {name} time of a request in the goodput, in ms (default: any)"
        add(f"--goodput-{name}-ms", type=float, default=math.inf, metavar="X", help=text)
    add("--json", metavar="FILE", help="append the result and every request (default: no file)")
    parser.set_defaults(run=run, parser=parser, verbose=False)


def run(args: argparse.Namespace) -> int:
    append_text(args.json, "")  # fails now if it cannot be written
    prompts = read_prompts(args.prompts) if args.prompts else []
    number = args.num_requests or len(prompts) or 64
    if prompts:
        prompts = [prompts[index % len(prompts)] for index in range(number)]
    else:
        prompts = random_prompts(number, args.prompt_words, args.shared_words, args.seed)
    client = OpenAIClient(args.url, args.api_key, max_connections=None)  # the load decides
    args.model = args.model or asyncio.run(client.model())
    done: list[Measured] = []
    try:
        asyncio.run(send_all(client, prompts, args, done))
    finally:  # after Ctrl-C, the requests that have ended
        limits = [getattr(args, f"goodput_{name.replace('-', '_')}_ms") for name in LIMITS]
        result = summary(done, limits)
        for name, value in result.items():
            print(f"{name.replace('_', ' '):<30}{shown(value)}")
        requests = [asdict(one) for one in sorted(done, key=lambda one: one.sent)]
        append_text(args.json, json.dumps(result | {"requests": requests}) + "\n")
    return 1 if result["num_failed"] else 0


def random_prompts(number: int, num_words: int, num_shared: int, seed: int) -> list[str]:
    """Texts that have only their first words in common."""
    words, rng = WORDS.split(), random.Random(seed)
    shared = rng.choices(words, k=min(num_shared, num_words))
    return [
        " ".join([*shared, *rng.choices(words, k=num_words - len(shared)), f"({index})"])
        for index in range(number)
    ]


def read_prompts(path: str) -> list[Any]:
    """Read a prompt from each line of JSON: its "messages", or its "prompt"."""
    try:
        records = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
        prompts = [record.get("messages") or record["prompt"] for record in records]
    except (ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error!r}") from error
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


async def send_all(
    client: OpenAIClient, prompts: Sequence[Any], args: argparse.Namespace, done: list[Measured]
) -> None:
    """Send every prompt once, at random times or as soon as there is room."""
    from tqdm import tqdm

    fields = {"model": args.model, "max_tokens": args.max_tokens}
    room = asyncio.Semaphore(args.concurrency or (16 if args.rate is None else len(prompts)))
    rng, begin = random.Random(args.seed), time.perf_counter()
    bar = tqdm(total=len(prompts), unit="request", disable=None, leave=False)

    async def send(prompt: Any) -> None:
        try:
            done.append(await measure(client, prompt, fields, begin))
        finally:
            room.release()
            bar.update()

    tasks, due = [], begin
    with bar:
        for prompt in prompts:
            if args.rate is not None:
                due += rng.expovariate(args.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await room.acquire()
            tasks.append(asyncio.create_task(send(prompt)))
        await asyncio.gather(*tasks)


async def measure(
    client: OpenAIClient, prompt: Any, fields: dict[str, Any], origin: float
) -> Measured:
    is_chat = any(isinstance(each, dict) for each in prompt)  # else a text, or token ids
    body = {**fields, "stream_options": {"include_usage": True}}
    body |= {"messages" if is_chat else "prompt": prompt}
    path = "chat/completions" if is_chat else "completions"
    begin = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    try:
        async with contextlib.aclosing(client.stream(path, body)) as events:
            async for event in events:
                usage = event.get("usage") or usage
                if any(map(_has_text, event["choices"])):
                    times.append(time.perf_counter())
    except NanovllmError as error:
        return Measured(begin - origin, error=str(error))
    end = time.perf_counter()
    if not times:
        return Measured(begin - origin, seconds=end - begin, error="no text came")
    gaps = tuple(after - before for before, after in pairwise(times))
    counts = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or len(times)
    return Measured(begin - origin, times[0] - begin, gaps, end - begin, *counts)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    names = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


def summary(measured: Sequence[Measured], limits_ms: Sequence[float]) -> dict[str, Any]:
    """Rates over the whole time, and percentiles in milliseconds."""
    good = [one for one in measured if one.error is None]
    seconds = max((one.sent + one.seconds for one in measured), default=0.0) or 1e-9
    return {
        "num_requests": len(measured),
        "num_failed": len(measured) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "goodput_requests_per_second": sum(one.is_within(limits_ms) for one in good) / seconds,
        "prompt_tokens_per_second": sum(one.num_prompt_tokens for one in good) / seconds,
        "tokens_per_second": sum(one.num_tokens for one in good) / seconds,
        "first_token_ms": percentiles([one.first_token for one in good]),
        "inter_token_ms": percentiles([gap for one in good for gap in one.gaps]),
        "end_to_end_ms": percentiles([one.seconds for one in good]),
        "errors": Counter(one.error for one in measured if one.error is not None),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    import numpy as np

    points = (50, 90, 99) if seconds else ()
    return {f"p{point}": 1000 * float(np.percentile(seconds, point)) for point in points}


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(each)}" for name, each in value.items())
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
