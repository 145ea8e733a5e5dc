"""Send requests to an OpenAI-compatible server, and measure the latency that clients see.

With --rate, requests are sent at random times (a Poisson process), and --concurrency, if given,
limits how many are in flight. Without --rate, --concurrency requests (16 by default) are kept in
flight. Responses are streamed.

examples:
  nanovllm bench serve --concurrency 64 --num-requests 512
  nanovllm bench serve --rate 10 --goodput-first-token-ms 500 --goodput-inter-token-ms 50
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanovllm.batch.rows import read_rows
from nanovllm.cli import options
from nanovllm.errors import ConfigError, NanovllmError
from nanovllm.serve.client import OpenAIClient
from nanovllm.validation import option

WORDS = "the engine reads a prompt in blocks and writes one token of every answer in each step"
COUNT, RATE = options.at_least(1), options.positive


@dataclass(frozen=True, slots=True)
class Load:
    """Options that determine the requests and their arrival times."""

    model: str | None = option(None, "model name to request", unset="the server's first")
    rate: float | None = option(None, "requests per second", parse=RATE, alias="--request-rate")
    concurrency: int | None = option(
        None, "maximum number of requests in flight", parse=COUNT, alias="--max-concurrency"
    )
    num_requests: int | None = option(
        None,
        "number of requests to send",
        parse=COUNT,
        alias="--num-prompts",
        unset="all --prompts, or 64",
    )
    max_tokens: int = option(128, "maximum output tokens", parse=COUNT)
    prompt_words: int = option(256, "words per random prompt", parse=COUNT)
    shared_words: int = option(0, "words that all random prompts share as a prefix")
    prompts: str | None = option(None, 'JSON lines with "messages" or "prompt"', unset="random")
    seed: int = option(0, "seed of random prompts and arrival times")
    goodput_first_token_ms: float = option(math.inf, "goodput: maximum time to first token")
    goodput_inter_token_ms: float = option(math.inf, "goodput: maximum mean time between tokens")
    goodput_end_to_end_ms: float = option(math.inf, "goodput: maximum time of a whole request")
    json: str | None = option(None, "file to which the result and every request are appended")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one request; `first_token` and `seconds` are seconds since it was sent."""

    sent: float  # seconds since the benchmark began
    first_token: float = 0.0
    gaps: tuple[float, ...] = ()  # times between consecutive pieces of the output
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    def is_in_goodput(self, load: Load) -> bool:
        mean_gap = sum(self.gaps) / max(len(self.gaps), 1)
        is_early = 1000 * self.first_token <= load.goodput_first_token_ms
        is_steady = 1000 * mean_gap <= load.goodput_inter_token_ms
        return is_early and is_steady and 1000 * self.seconds <= load.goodput_end_to_end_ms


def add_parser(names: options.Commands) -> None:
    about, usage = "measure an OpenAI-compatible server", "nanovllm bench serve [options]"
    parser = options.add_command(names, "serve", about, usage, __doc__)
    options.add_server_options(parser, url="http://127.0.0.1:8000")
    options.add_options(parser, "load", Load)
    parser.set_defaults(run=run, parser=parser, verbose=False)


def run(args: argparse.Namespace) -> int:
    load = Load(**options.fields_in(args, Load))
    options.append_json(load.json)
    # `load` limits the concurrency, so the client does not.
    client = OpenAIClient(args.url, args.api_key, max_connections=None)
    model = load.model or asyncio.run(client.model())
    done: list[Measured] = []
    try:
        asyncio.run(send_all(client, model, make_prompts(load), load, done))
    finally:  # after Ctrl-C, report the requests that have finished
        result = summary(done, load)
        for name, value in result.items():
            print(f"{name.replace('_', ' '):<30}{shown(value)}")
        requests = [asdict(one) for one in sorted(done, key=lambda one: one.sent)]
        options.append_json(load.json, result | {"requests": requests})
    return 1 if result["num_failed"] else 0


def make_prompts(load: Load) -> list[Any]:
    """Read one prompt per row of a file, or make random texts that share only a prefix."""
    if load.prompts is not None:
        rows = [row.fields for row in read_rows(Path(load.prompts))]
        prompts = [row.get("messages") or row.get("prompt") for row in rows]
        if not prompts or None in prompts:
            raise ConfigError(f"every row of {load.prompts} needs messages or a prompt")
        return [prompts[i % len(prompts)] for i in range(load.num_requests or len(prompts))]
    words, rng = WORDS.split(), random.Random(load.seed)
    shared = rng.choices(words, k=min(load.shared_words, load.prompt_words))
    return [
        " ".join([*shared, *rng.choices(words, k=load.prompt_words - len(shared)), f"({index})"])
        for index in range(load.num_requests or 64)
    ]


async def send_all(
    client: OpenAIClient, model: str, prompts: Sequence[Any], load: Load, done: list[Measured]
) -> None:
    """Send every prompt once, as the rate and the concurrency limit allow."""
    from tqdm import tqdm

    permits = asyncio.Semaphore(load.concurrency or (16 if load.rate is None else len(prompts)))
    rng, begin = random.Random(load.seed), time.perf_counter()
    fields = {"model": model, "max_tokens": load.max_tokens}

    async def send(prompt: Any) -> None:
        try:
            done.append(await measure(client, prompt, fields, begin))
        finally:
            permits.release()
            bar.update()

    tasks, due = [], begin
    with tqdm(total=len(prompts), unit="request", disable=None, leave=False) as bar:
        for prompt in prompts:
            if load.rate is not None:
                due += rng.expovariate(load.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await permits.acquire()
            tasks.append(asyncio.create_task(send(prompt)))
        await asyncio.gather(*tasks)


async def measure(
    client: OpenAIClient, prompt: Any, fields: dict[str, Any], origin: float
) -> Measured:
    begin = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    try:
        async for event in client.stream(prompt, **fields):
            usage = event.get("usage") or usage
            if any(map(has_text, event["choices"])):
                times.append(time.perf_counter())
    except NanovllmError as error:
        return Measured(begin - origin, error=str(error))
    if not times:
        return Measured(begin - origin, error="the response has no text")
    gaps = tuple(after - before for before, after in pairwise(times))
    counts = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or len(times)
    return Measured(begin - origin, times[0] - begin, gaps, time.perf_counter() - begin, *counts)


def has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of a stream chunk has anything other than the message's role."""
    delta = choice.get("delta") or {"text": choice.get("text")}
    return any(value for name, value in delta.items() if name != "role")


def summary(measured: Sequence[Measured], load: Load) -> dict[str, Any]:
    """Return rates over the whole run, and latency percentiles in milliseconds."""
    good = [one for one in measured if one.error is None]
    seconds = max((one.sent + one.seconds for one in measured), default=0.0) or 1e-9
    return {
        "num_requests": len(measured),
        "num_failed": len(measured) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "goodput_requests_per_second": sum(one.is_in_goodput(load) for one in good) / seconds,
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
