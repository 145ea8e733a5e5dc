"""Measure what the dashboard page costs the engine when the browser shares its cores.

    python -m benchmarks.engine.page_cost [--streams 64] [--max-tokens 8] [--rounds 20]

Streams of one server run in turns with the page open and with a blank page, in an order that
alternates between rounds, so that a machine that slows down favors neither. Prints the ratio of
each round, the median with its standard error, and the CPU time of the browser. The target is 98%
of the throughput without the page.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.engine.async_streams import stream_parser
from benchmarks.engine.http_streams import Streams, core_seconds, served

ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
SETTLING_SECONDS = 1.5  # until a page is loaded and drawn


def main() -> None:
    parser = stream_parser(__doc__)
    parser.add_argument("--browser", default="chromium")
    parser.set_defaults(max_tokens=8, rounds=20)
    args = parser.parse_args()
    path = shutil.which(args.browser)
    if path is None:
        raise SystemExit(f"there is no browser named {args.browser}; set --browser")
    with served(args) as (_, streams):
        servers = children()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
            ratios = compare(browser.new_page(), streams, args.rounds, servers)
            browser.close()
    error = 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(f"median {statistics.median(ratios):.3f}, standard error {error:.3f}")


def compare(page: Any, streams: Streams, num_rounds: int, servers: set[int]) -> list[float]:
    """Return, for each round, the time without the page divided by the time with it."""
    places = {"blank": "about:blank", "engine": f"http://127.0.0.1:{streams.port}/"}
    ratios = []
    streams.post_all()
    for number in range(num_rounds):
        taken, used = {}, {}
        for name in sorted(places, reverse=number % 2 == 0):
            page.goto(places[name])
            time.sleep(SETTLING_SECONDS)
            start, cores = time.perf_counter(), browser_seconds(servers)
            streams.post_all()
            taken[name] = time.perf_counter() - start
            used[name] = browser_seconds(servers) - cores
        ratios.append(taken["blank"] / taken["engine"])
        print(
            f"{ratios[-1]:.3f}: {taken['blank']:.2f} s with a blank page, {taken['engine']:.2f} s;"
            f" the browser took {used['blank']:.2f} and {used['engine']:.2f} s of CPU time",
            flush=True,
        )
    return ratios


def children() -> set[int]:
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return set(map(int, " ".join(lists).split()))


def browser_seconds(servers: set[int]) -> float:
    """Return the CPU time of all child processes except the server's and its clients'."""
    return sum(core_seconds(pid) for pid in children() - servers)


if __name__ == "__main__":
    main()
