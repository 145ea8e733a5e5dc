"""What it costs an engine to be watched: CPU time of its loop, with and without a watcher.

    python -m benchmarks.engine.watching_cost [--rows 64] [--step-ms 5]

The device does nothing, so that all time is the host's: scheduling, and snapshots, packed for the
socket. The least of some rounds counts. Steps of `--step-ms` are what a device
would take; the bar is 2% of them.
"""

from __future__ import annotations

import argparse
import pickle
import time

from benchmarks.engine.scheduler_cost import decoding_core
from nanovllm.serve.core_process import SECONDS_BETWEEN, take_snapshot
from nanovllm.serve.core_records import CoreStats

NUM_STEPS = 400
ROUNDS = 7


def main() -> None:
    args = parse_args()
    for num_rows in args.rows:
        pairs = [
            [seconds(num_rows, args.step_ms, is_watched) for is_watched in (False, True)]
            for _ in range(ROUNDS)
        ]
        alone, watched = map(min, zip(*pairs, strict=True))
        share = (watched - alone) / (args.step_ms / 1000)
        print(
            f"{num_rows:5d} rows: {alone * 1e6:7.1f} us a step alone, {watched * 1e6:7.1f} watched:"
            f" {share:.2%} of {args.step_ms:g} ms"
        )


def seconds(num_rows: int, step_ms: float, is_watched: bool) -> float:
    """CPU seconds of a step of steady decode."""
    core = decoding_core(num_rows)
    steps_between = round(SECONDS_BETWEEN / (step_ms / 1000))
    for _ in range(5):
        core.step()
    begin = time.process_time()
    for step in range(NUM_STEPS):
        core.step()
        if is_watched and step % steps_between == 0:
            stats = CoreStats(num_running=num_rows, num_decode_tokens=step)
            pickle.dumps(take_snapshot(core, stats, 0.0), pickle.HIGHEST_PROTOCOL)
    return (time.process_time() - begin) / NUM_STEPS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, default=5.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
