"""What the page in a browser costs the engine that it shows, where both share the cores.

    python -m benchmarks.engine.page_cost [--streams 64] [--rounds 8] [--browser chromium]

Streams of one server run in turns with the page open and with a blank page; the order changes from
round to round, so that a machine that slows down speaks for neither. The bar is 98%.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator

from benchmarks.engine.async_streams import stream_parser
from benchmarks.engine.http_streams import Streams, core_seconds, measure, served

SETTLING_SECONDS = 4.0  # until a browser has started and drawn its page


def main() -> None:
    parser = stream_parser(__doc__)
    parser.add_argument("--browser", default="chromium")
    args = parser.parse_args()
    path = shutil.which(args.browser)
    if path is None:
        raise SystemExit(f"no browser is found under the name {args.browser}")
    ratios = []
    with served(args) as (_, streams):
        for number in range(args.rounds + 1):
            pages = ["about:blank", f"http://127.0.0.1:{streams.port}/"]
            order = pages if number % 2 else pages[::-1]
            taken = {page: seconds(path, page, streams) for page in order}
            alone, watched = (taken[page] for page in pages)
            print(
                f"a blank page {alone[0]:.2f} s, the engine's {watched[0]:.2f} s:"
                f" {alone[0] / watched[0]:.3f}; browsers took {alone[1]:.2f} and"
                f" {watched[1]:.2f} s of the cores",
                flush=True,
            )
            ratios.append(alone[0] / watched[0])
    print(f"median of {args.rounds}, without the first: {statistics.median(ratios[1:]):.3f}")


def seconds(browser: str, page: str, streams: Streams) -> tuple[float, float]:
    """How long all streams take while the browser shows a page, and its own time of the cores."""
    with shown(browser, page) as process:
        before = core_seconds(process.pid)
        taken = measure(streams.post_all).seconds
        return taken, core_seconds(process.pid) - before


@contextlib.contextmanager
def shown(browser: str, page: str) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"]
        size = ["--window-size=1280,800", f"--user-data-dir={folder}", "--remote-debugging-port=0"]
        process = subprocess.Popen([browser, *flags, *size, page], stderr=subprocess.DEVNULL)
        time.sleep(SETTLING_SECONDS)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
