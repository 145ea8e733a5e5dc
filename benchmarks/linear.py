"""Projections on a GPU: microseconds of cuBLAS and of the engine's kernels, beside the floor.

    python -m benchmarks.linear [--models qwen3-8b ...] [--rows 1 64 ...] [--sweep]

Times are medians over replays of a CUDA graph, in which so many weights take turns that the cache
does not help. --sweep adds the best three other configurations: of one row 2x4096w8 (outputs x
inputs of a tile, warps), of more 16x64s8p2 (rows x inputs of a tile, stages, splits).
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton import TritonError

from benchmarks import replays
from benchmarks.linear_variants import (
    DTYPE,
    Shape,
    Variant,
    candidates,
    chosen,
    compile_pool,
    compile_variant,
    first_line,
    library,
    shapes_of,
)
from nanovllm.bench.floors import Rates
from nanovllm.bench.models import model_names, model_path
from nanovllm.bench.options import at_least
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError
from nanovllm.models.config_json import read_model_config
from nanovllm.platforms.cuda import CudaPlatform

ROWS = [1, 8, 32, 64, 128, 256]
MIN_BYTES, MIN_CALLS = 420_000_000, 8  # of the weights that take turns; in one graph
NUM_SHOWN = 3
MAX_ERROR = 0.02  # a variant's distance from cuBLAS, relative to its length

Timings = dict[str, float]  # microseconds by variant


@dataclass(frozen=True, slots=True)
class Case:
    names: list[str]  # "qwen3-8b qkv", ...
    shape: Shape
    num_rows: int
    variants: list[Variant]
    failures: list[Future[str | None]]  # one a variant: why it could not be compiled


def main() -> int:
    args = parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("these are kernels of a GPU, and this machine has no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, us", flush=True)
    platform = CudaPlatform(gpu_memory_utilization=1.0)
    # Graphs share a pool of memory, which lasts as long as one of them does.
    keeps_pool = platform.record(lambda: torch.zeros(1, device=platform.device))
    pool = compile_pool()
    try:
        measure_all(plan(args, platform.device, pool), platform)
    finally:
        pool.shutdown(cancel_futures=True)
    del keeps_pool
    return 0


def plan(args: argparse.Namespace, device: torch.device, pool: ProcessPoolExecutor) -> list[Case]:
    """List all cases, and start to compile their variants in that order."""
    cases = []
    for shape, names in shapes_by_name(args.models).items():
        for num_rows in args.rows:
            variants = [chosen(shape)]
            if args.sweep:
                variants += candidates(shape, num_rows, device)
            jobs = [pool.submit(compile_variant, shape, num_rows, each) for each in variants]
            cases.append(Case(names, shape, num_rows, variants, jobs))
    return cases


def shapes_by_name(models: list[str]) -> dict[Shape, list[str]]:
    """Each shape that occurs, once, and the projections that have it."""
    names: dict[Shape, list[str]] = {}
    for model in models:
        config = read_model_config(json.loads(Path(model_path(model)).read_text()))
        for name, shape in shapes_of(config).items():
            names.setdefault(shape, []).append(f"{model} {name}")
    return names


def measure_all(cases: list[Case], platform: CudaPlatform) -> None:
    weights: list[Tensor] = []
    shape = None
    for case in cases:
        if case.shape != shape:
            shape = case.shape
            weights.clear()  # before the next ones are made
            weights += make_weights(shape, platform.device)
            print(f"{shape}: {', '.join(case.names)}")
        print(line(case.shape, case.num_rows, measure(case, weights, platform)), flush=True)


def make_weights(shape: Shape, device: torch.device) -> list[Tensor]:
    num_weights = -(-MIN_BYTES // (shape.num_elements * DTYPE.itemsize))
    size = shape.num_out, shape.num_in
    return [torch.randn(size, device=device, dtype=DTYPE) for _ in range(num_weights)]


def measure(case: Case, weights: list[Tensor], platform: CudaPlatform) -> Timings:
    """Time each variant that can be compiled and run, cuBLAS first; tell of the others."""
    x = torch.randn(case.num_rows, case.shape.num_in, device=platform.device, dtype=DTYPE)
    reference = library(case.shape)
    expected = reference.run(x, weights[0])
    timings = {reference.name: microseconds(reference, x, weights, platform)}
    for variant, failure in zip(case.variants, case.failures, strict=True):
        why = failure.result() or defect(variant, x, weights[0], expected)
        if why is None:
            timings[variant.name] = microseconds(variant, x, weights, platform)
        else:
            print(f"  {case.num_rows} rows, {variant.name}: {why}", file=sys.stderr)
    return timings


def defect(variant: Variant, x: Tensor, weight: Tensor, expected: Tensor) -> str | None:
    """Why a variant cannot be timed: it does not fit the device, or its result is wrong."""
    try:
        y = variant.run(x, weight).float()
    except TritonError as error:  # out of shared memory or registers
        return first_line(error)
    total = y if y.dim() == 2 else y.sum(0)
    distance = float((total - expected).norm() / expected.float().norm())
    return None if distance < MAX_ERROR else f"wrong by {distance:.1%}"


def microseconds(
    variant: Variant, x: Tensor, weights: list[Tensor], platform: CudaPlatform
) -> float:
    """Median time of one projection, among others with other weights."""
    num_calls = max(MIN_CALLS, len(weights))

    def project() -> Tensor:
        for index in range(num_calls):
            y = variant.run(x, weights[index % len(weights)])
        return y

    return replays.microseconds(project, platform) / num_calls


def line(shape: Shape, num_rows: int, timings: Timings) -> str:
    """One case: the two that are compared, the floor, and the best of the others."""
    others = dict(timings)
    cells = [f"{num_rows:>5} rows"]
    for name in ("cuBLAS", "ours"):
        took = others.pop(name, None)
        cells.append(f"{name} {'-' if took is None else f'{took:.2f}':>8}")
    cells.append(f"floor {floor(shape, num_rows):>8.2f}")
    best = sorted(others.items(), key=lambda item: item[1])[:NUM_SHOWN]
    return "   ".join([*cells, *(f"{name} {took:.2f}" for name, took in best)])


def floor(shape: Shape, num_rows: int) -> float:
    """Microseconds to read the weight or, with very many rows, to multiply it."""
    rates = Rates()
    read = shape.num_elements * DTYPE.itemsize / rates.bytes_per_second
    return 1e6 * max(read, 2 * shape.num_elements * num_rows / rates.flops_per_second)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = model_names()
    text = f"of {', '.join(models)} (default: all)"
    add("--models", nargs="+", choices=models, default=models, metavar="NAME", help=text)
    text = "rows of x (default: 1 8 32 64 128 256)"
    add("--rows", nargs="+", type=at_least(1), default=ROWS, metavar="N", help=text)
    add("--sweep", action="store_true", help="try other configurations too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
