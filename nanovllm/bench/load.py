"""A load for any OpenAI server: requests that arrive as they would, and how long each waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanovllm.client import OpenAIClient
from nanovllm.errors import ConfigError, NanovllmError

PERCENTILES = (50, 90, 99)
TEXT = "the engine reads a prompt in blocks and writes one token of every answer in each step"


@dataclass(frozen=True, slots=True)
class Load:
    """When requests come: at random, so many a second on average, or as soon as another ends."""

    rate: float | None  # None: as soon as there is room
    concurrency: int | None  # most at once; None: any number
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One request: times in seconds, from when it was sent."""

    sent: float  # since the load began
    first_token: float = 0.0
    gaps: tuple[float, ...] = ()  # between the pieces of its answer
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count as goodput; None: anything."""

    first_token: float | None = None
    gap: float | None = None  # its mean
    seconds: float | None = None

    def hold(self, one: Measured) -> bool:
        gap = sum(one.gaps) / max(len(one.gaps), 1)
        pairs = ((one.first_token, self.first_token), (gap, self.gap), (one.seconds, self.seconds))
        return one.error is None and all(most is None or value <= most for value, most in pairs)


def random_prompts(number: int, num_words: int, num_shared: int, seed: int) -> list[str]:
    """Texts of so many words, the first of which they share; no two are the same."""
    rng = random.Random(seed)
    shared = _words(rng, min(num_shared, num_words))
    return [
        " ".join([*shared, *_words(rng, num_words - len(shared)), f"({index})"])
        for index in range(number)
    ]


def read_prompts(path: str) -> list[Any]:
    """Read a prompt from each line of JSON: its "messages", or its "prompt"."""
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            record = json.loads(line) if line.strip() else None
            if record is None:
                continue
            prompt = record.get("messages") or record.get("prompt")
            if not prompt:
                raise ConfigError(f"{path}, line {number} has neither messages nor a prompt")
            prompts.append(prompt)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


async def run_load(
    client: OpenAIClient,
    model: str,
    prompts: Sequence[Any],
    load: Load,
    on_done: Callable[[Measured], object] = lambda _: None,
    max_seconds: float = math.inf,
) -> list[Measured]:
    """Send every prompt once; return what each took, in their order.

    After `max_seconds` no more are sent, and those under way are waited for.
    """
    rng = random.Random(load.seed)
    room = asyncio.Semaphore(load.concurrency or len(prompts))
    begin = time.perf_counter()

    async def one(prompt: Any) -> Measured:
        try:
            measured = await _measure(client, model, prompt, load.max_tokens, begin)
        finally:
            room.release()
        on_done(measured)
        return measured

    tasks = []
    due = begin
    for prompt in prompts:
        if load.rate is not None:
            due += rng.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await room.acquire()
        if time.perf_counter() - begin > max_seconds:
            break
        tasks.append(asyncio.create_task(one(prompt)))
    return await asyncio.gather(*tasks)


async def _measure(
    client: OpenAIClient, model: str, prompt: Any, max_tokens: int, origin: float
) -> Measured:
    is_chat = any(isinstance(each, dict) for each in prompt)  # or a text, or token ids
    fields = {"model": model, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    fields |= {"messages" if is_chat else "prompt": prompt}
    path = "chat/completions" if is_chat else "completions"
    begin = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    try:
        async with contextlib.aclosing(client.stream(path, fields)) as events:
            async for event in events:
                usage = event.get("usage") or usage
                if _has_text(event):
                    times.append(time.perf_counter())
    except NanovllmError as error:
        return Measured(begin - origin, error=str(error))
    end = time.perf_counter()
    if not times:
        return Measured(begin - origin, seconds=end - begin, error="no text came")
    return Measured(
        begin - origin,
        times[0] - begin,
        tuple(after - before for before, after in pairwise(times)),
        end - begin,
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or len(times),
    )


def _has_text(event: dict[str, Any]) -> bool:
    for choice in event["choices"]:
        delta = choice.get("delta") or choice
        names = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
        if any(delta.get(name) for name in names):
            return True
    return False


def summary(all_measured: Sequence[Measured], limits: Limits) -> dict[str, Any]:
    """What is reported: percentiles in milliseconds, and rates over the whole time."""
    good = [one for one in all_measured if one.error is None]
    end = max((one.sent + one.seconds for one in all_measured), default=0.0)
    seconds = max(end - min((one.sent for one in all_measured), default=0.0), 1e-9)
    errors: dict[str, int] = {}
    for one in all_measured:
        if one.error is not None:
            errors[one.error] = errors.get(one.error, 0) + 1
    return {
        "num_requests": len(all_measured),
        "num_failed": len(all_measured) - len(good),
        "errors": errors,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens_per_second": sum(one.num_prompt_tokens for one in good) / seconds,
        "tokens_per_second": sum(one.num_tokens for one in good) / seconds,
        "goodput_requests_per_second": sum(map(limits.hold, all_measured)) / seconds,
        "first_token_ms": _percentiles([one.first_token for one in good]),
        "inter_token_ms": _percentiles([gap for one in good for gap in one.gaps]),
        "end_to_end_ms": _percentiles([one.seconds for one in good]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    import numpy as np

    if not seconds:
        return None
    values = np.percentile(np.array(seconds) * 1000, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}


def table(result: dict[str, Any]) -> str:
    """The summary as lines to read."""
    rows = [
        f"{'requests':<16}{result['num_requests']:,}, {result['num_failed']:,} failed, in "
        f"{result['seconds']:.1f} s",
        f"{'throughput':<16}{result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:,.0f} new tok/s, "
        f"{result['prompt_tokens_per_second']:,.0f} prompt tok/s",
        f"{'goodput':<16}{result['goodput_requests_per_second']:.2f} requests/s within the limits",
        f"{'ms':<16}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES),
    ]
    names = {"first_token_ms": "first token", "inter_token_ms": "inter-token"}
    for key, name in {**names, "end_to_end_ms": "end to end"}.items():
        values = result[key]
        if values is not None:
            rows.append(f"{name:<16}" + "".join(f"{value:>12,.1f}" for value in values.values()))
    rows += [f"{count:,} x {error}" for error, count in result["errors"].items()]
    return "\n".join(rows)


def waits(all_measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of wait, of the requests that were answered."""
    good = [one for one in all_measured if one.error is None]
    seconds = {
        "first token": [one.first_token for one in good],
        "inter-token": [gap for one in good for gap in one.gaps],
        "end to end": [one.seconds for one in good],
    }
    return {name: [1000 * each for each in values] for name, values in seconds.items()}


def _words(rng: random.Random, number: int) -> list[str]:
    return rng.choices(TEXT.split(), k=number)
