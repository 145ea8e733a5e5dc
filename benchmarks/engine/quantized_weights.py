"""Measure models whose weights stay quantized on the GPU: decode, prefill and mixed requests.

    python -m benchmarks.engine.quantized_weights --weights fp8 int4 --case bs1 prefill

Weights are random, in the formats of real checkpoints; the LM head stays in bfloat16. Needs a CUDA
device that supports these quantized weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from benchmarks.floors import Rates, model_cost
from benchmarks.models import model_names, model_path
from benchmarks.report.records import check_writable, keep, number, versions_text
from benchmarks.runner import run_once
from benchmarks.workloads import Workload, mixed, uniform
from nanovllm import LLM
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.config import ModelConfig

_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    method = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return {**method, "config_groups": {"group_0": group}}


# The quantization_config of config.json, and the bits per weight, including scales and zeros.
WEIGHTS: dict[str, tuple[dict[str, Any] | None, float]] = {
    "bf16": (None, 16),
    "fp8": (_compressed("float-quantized", _FP8), 8),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128),
    "int4": (_compressed("pack-quantized", _INT4), 4 + 16 / 128),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 24 / 128),
}
UNITS = {"nano": "tok/s", "prefill": "tok/s"}
CASES = ("bs1", "bs8", "bs64", "bs256", "prefill", "nano")


def main() -> int:
    args = parse_args()
    check_writable(args.json)
    print(versions_text())
    for name in args.weights:
        stored, bits = WEIGHTS[name]
        with tempfile.TemporaryDirectory() as folder:
            config = json.loads(Path(model_path(args.model)).read_text())
            path = Path(folder) / "config.json"
            path.write_text(json.dumps({**config, "quantization_config": stored}))
            options: dict[str, Any] = {"device": "cuda", "kv_cache_dtype": args.kv_cache_dtype}
            with LLM(path, load_format="dummy", skip_tokenizer_init=True, **options) as llm:
                for case in args.case:
                    report(args, name, bits, case, llm)
    return 0


def report(args: argparse.Namespace, name: str, bits: float, case: str, llm: LLM) -> None:
    """Measure one case; print the result, and append it to the file if there is one."""
    config = llm.engine.model_config
    workload = workload_of(case, config.vocab_size)
    passes = range(args.repeats + 1)  # the first pass is a warm-up
    timings = [run_once(llm, workload, uuid.uuid4().hex) for _ in passes][1:]
    unit = UNITS.get(case, "ms/step")
    if case == "nano":
        runs = [workload.num_new_tokens / timing.seconds for timing in timings]
    elif case == "prefill":
        runs = [workload.num_prompt_tokens / timing.seconds for timing in timings]
    else:
        runs = [1000 * timing.decode_seconds / timing.num_decode_steps for timing in timings]
    value, floor = number(statistics.median(runs)), read_floor(config, bits)
    of_weights = f", {floor:.2f} ms to read the weights" if case == "bs1" else ""
    shown = " ".join(map(number, runs))
    print(
        f"{args.model} {name:<10}{case:<8}{value:>9} {unit}   runs {shown}{of_weights}", flush=True
    )
    cells = {"model": args.model, "weights": name, "case": case, "result": f"{value} {unit}"}
    about = {"model": args.model, "device": "cuda", "dtype": llm.engine.info.dtype, "cells": cells}
    kept = f"weights-{name}-{case}"
    if args.kv_cache_dtype != "auto":
        kept += f"-kv-{args.kv_cache_dtype}"
        cells["weights"] += f", KV {args.kv_cache_dtype}"
    keep(
        args.json, case=kept, unit=unit, runs=runs, floor=floor if case == "bs1" else None, **about
    )


def workload_of(case: str, vocab_size: int) -> Workload:
    if case == "nano":
        return mixed(vocab_size)
    if case == "prefill":
        return uniform(vocab_size, 64, 2048, 1)
    num_seqs = int(case.removeprefix("bs"))
    return uniform(vocab_size, num_seqs, 128, 512 if num_seqs == 1 else 256)


def read_floor(config: ModelConfig, bits: float) -> float:
    """Return the milliseconds that an H200 takes to read the quantized layers and the bf16 head."""
    cost = model_cost(config, 2)
    num_bytes = cost.layer_weights * bits / 8 + cost.head_weights * 2
    return 1000 * num_bytes / Rates().bytes_per_second


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, weights = parser.add_argument, list(WEIGHTS)
    names = model_names()
    add("--model", choices=names, default="qwen3-8b", help="(default: %(default)s)")
    text = f"one or more of {', '.join(weights)} (default: all)"
    add("--weights", nargs="+", choices=weights, default=weights, metavar="NAME", help=text)
    text = f"one or more of {', '.join(CASES)} (default: bs1 prefill)"
    add("--case", nargs="+", choices=CASES, default=["bs1", "prefill"], metavar="NAME", help=text)
    add("--repeats", type=at_least(1), default=3, help="after a warm-up (default: %(default)s)")
    caches = ("auto", "fp8")
    add("--kv-cache-dtype", choices=caches, default="auto", help="(default: %(default)s)")
    add("--json", metavar="FILE", help="append each result as a line of JSON (default: none)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
