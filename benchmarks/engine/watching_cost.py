"""Measure what a subscriber costs the engine: CPU time of its loop, with and without one.

    python -m benchmarks.engine.watching_cost [--rows 64] [--step-ms 5]

The device does nothing, so only host time is measured: scheduling, and snapshots serialized for the
socket. Reports the minimum over several rounds. `--step-ms` is the assumed duration of a step on a
device; a subscriber should cost at most 2% of it.
"""

from __future__ import annotations

import argparse
import pickle
import time

from benchmarks.engine.scheduler_cost import decoding_core
from nanovllm.engine.timing import StepLog
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.live.observer import SNAPSHOT_SECONDS
from nanovllm.serve.live.snapshots import take_snapshot

NUM_STEPS = 400
ROUNDS = 7


def main() -> None:
    args = parse_args()
    for num_rows in args.rows:
        pairs = [
            [seconds(num_rows, args.step_ms, has_subscriber) for has_subscriber in (False, True)]
            for _ in range(ROUNDS)
        ]
        alone, subscribed = map(min, zip(*pairs, strict=True))
        share = (subscribed - alone) / (args.step_ms / 1000)
        print(
            f"{num_rows:5d} rows: {alone * 1e6:7.1f} us per step, {subscribed * 1e6:7.1f} with a"
            f" subscriber: {share:.2%} of {args.step_ms:g} ms"
        )


def seconds(num_rows: int, step_ms: float, has_subscriber: bool) -> float:
    """Return the CPU seconds of a steady decode step."""
    core, log = decoding_core(num_rows), StepLog()
    if has_subscriber:
        core.log = log
    steps_between = round(SNAPSHOT_SECONDS / (step_ms / 1000))
    for _ in range(5):
        core.step()
    begin = time.process_time()
    for step in range(NUM_STEPS):
        core.step()
        if has_subscriber and step % steps_between == 0:
            stats = CoreStats(num_running=num_rows, num_decode_tokens=step)
            pickle.dumps(take_snapshot(core, log, stats, 0.0), pickle.HIGHEST_PROTOCOL)
    return (time.process_time() - begin) / NUM_STEPS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, default=5.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
