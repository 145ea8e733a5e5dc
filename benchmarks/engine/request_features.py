"""Measure what request features cost: decode steps in which every row uses one, or none.

    python -m benchmarks.engine.request_features --model qwen3-0.6b --batch 256

The features run one after the other, in several rounds. The target is at most 1.15 times the plain
step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import uuid
from typing import Any

from benchmarks.report.records import check_writable, keep, number, versions_text
from benchmarks.runner import open_llm, run_once
from benchmarks.workloads import uniform
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import add_engine_options, at_least, dashed
from nanovllm.cli.start import configure_logging

BAR = 1.15
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 5},
    "penalties": PENALTIES,
    "bias": {"logit_bias": dict.fromkeys(range(10), -1.0)},
    "allowed": {"allowed_token_ids": [*range(1000)]},
    "top": {"top_k": 50, "top_p": 0.95},
    "all": {"logprobs": 5, **PENALTIES, "logit_bias": {7: 1.0}, "top_p": 0.95},
}


def main() -> int:
    args = parse_args()
    configure_logging(args.verbose)
    check_writable(args.json)
    with open_llm(args) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        workload = uniform(vocab_size, args.batch, args.prompt_len, args.new_tokens)
        runs: dict[str, list[float]] = {name: [] for name in FEATURES}
        for _ in range(args.repeats + 1):  # the first round is a warm-up
            for name, asked in FEATURES.items():
                timing = run_once(llm, workload, uuid.uuid4().hex, **asked)
                runs[name].append(1000 * timing.decode_seconds / timing.num_decode_steps)
    about = {"model": args.model, "device": llm.engine.info.device}
    plain = statistics.median(runs["plain"][1:])
    for name, (_, *steps) in runs.items():
        value = statistics.median(steps)
        share = f"{value / plain:.2f} (bar: {BAR})"
        print(f"{name:<12}{number(value):>8} ms/step   {share}   runs {steps}", flush=True)
        cells = {"model": args.model, "every row asks for": name, "ms/step": number(value)}
        cells["of plain"] = share
        case = f"features-bs{args.batch}-{name}"
        keep(args.json, case=case, unit="ms/step", runs=steps, floor=None, cells=cells, **about)
    print(versions_text())
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, count = parser.add_argument, at_least(1)
    add("--batch", type=count, default=256, help="requests (default: %(default)s)")
    add("--prompt-len", type=count, default=128, help="tokens (default: %(default)s)")
    add("--new-tokens", type=at_least(2), default=256, help="(default: %(default)s)")
    add("--repeats", type=count, default=3, help="after a warm-up (default: %(default)s)")
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")
    add_engine_options(parser, "qwen3-0.6b", load_format="dummy")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
