"""Time every configuration of the kernels for quantized projections on a GPU, and find the best.

    python -m benchmarks.kernels.quantized_linear [--weights fp8 int4] [--rows 1 8 64 256]
        [--shapes qkv ...]

Shapes are Qwen3-8B's. First, several processes compile the kernels. Times are medians over
replays of a CUDA graph that rotates through enough weights to defeat the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import GpuTimer, Run, floor
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.devices.cuda.compile_ahead import compile_ahead
from nanovllm.devices.cuda.kernels.linear_few_rows import (
    FewRowsConfig,
    few_rows_config,
    few_rows_linear,
    make_counters,
)
from nanovllm.devices.cuda.kernels.linear_fp8 import fp8_many_rows, scaled_mm_weight
from nanovllm.devices.cuda.kernels.linear_one_row import (
    OneRowConfig,
    one_row_config,
    one_row_linear,
)
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import Activation, NormWeights, ResidualStream
from nanovllm.ops.quantized_weight import BLOCK, QuantizedWeight
from nanovllm.ops.torch_ops import TorchOps
from tests.ops.quantized_products import quantized_product

DTYPE = torch.bfloat16
MIN_BYTES, MIN_CALLS = 200_000_000, 4  # total weight size and calls per graph
NUM_SHOWN = 3
NUM_SPLITS = (1, 2, 4, 8)
# Outputs, rows, warps and stages of a Triton program, keyed by the rows of x.
TILES: dict[int, list[tuple[int, int, int, int]]] = {
    16: [(64, 16, 4, 4), (64, 16, 4, 6), (128, 16, 4, 4), (128, 16, 8, 4), (128, 16, 8, 6)],
    32: [(64, 32, 4, 4), (128, 32, 4, 4), (128, 32, 8, 4), (256, 32, 8, 4)],
    64: [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)],
    128: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (256, 64, 8, 3), (256, 128, 8, 2)],
}
# For one row: outputs, inputs (0: all) and warps of a program, and programs per SM.
ONE_ROW = [
    *itertools.product((4, 8, 16), (0,), (4, 8), (2, 4)),
    *itertools.product((4, 8), (2048,), (2, 4), (4, 8)),
]


@dataclass(frozen=True, slots=True)
class Shape:
    num_out: int
    num_in: int
    activation: Activation | None = None
    is_summed: bool = False  # a norm follows and adds up the partial sums; else a norm precedes


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096, is_summed=True),
    "gate_up": Shape(24576, 4096, "silu"),
    "down": Shape(4096, 12288, is_summed=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A shape with a number of rows, and the calls of each implementation."""

    label: str
    num_bytes: int  # bytes of one weight
    num_flops: int
    expected: Callable[[], Tensor]
    ways: dict[str, list[Run]]
    rounded: Callable[[], Tensor]  # expected result with quantized activations
    rounding_ways: dict[str, list[Run]]


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    pairs = itertools.product(args.weights, args.shapes)
    cases = [case for kind, name in pairs for case in make_cases(kind, name, args.rows)]
    ways = [each for case in cases for each in (case.ways, case.rounding_ways)]
    runs = [calls[0] for each in ways for calls in each.values()]
    start = time.perf_counter()
    compile_ahead(partial(run_all, runs), args.processes)
    print(f"{len(runs)} variants compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for case in cases:
        report(timer, case, args.json)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    return 0


def run_all(runs: Sequence[Run]) -> None:
    for run in runs:
        try:
            run()
        except RuntimeError:
            continue  # reported when the variant is measured


def report(timer: GpuTimer, case: Case, path: str | None) -> None:
    """Print the times of the engine's choice, of the libraries and of the best configurations."""
    times = timer.measure(case.ways, case.expected())
    if case.rounding_ways:
        times |= timer.measure(case.rounding_ways, case.rounded())
    best = floor(case.num_bytes, case.num_flops)
    print(f"{case.label}   floor {best:.1f} us", flush=True)
    named = [name for name in times if not name.startswith("{")]
    tried = sorted((name for name in times if name.startswith("{")), key=times.__getitem__)
    for name in (*named, *tried[:NUM_SHOWN]):
        rate = case.num_bytes / times[name] / 1000
        print(f"  {times[name]:8.2f} us {rate:7.0f} GB/s  {name}", flush=True)
    if path is not None:
        with Path(path).open("a") as file:
            file.write(json.dumps({"case": case.label, "floor": best, "us": times}) + "\n")


def make_cases(kind: str, name: str, rows: list[int]) -> Sequence[Case]:
    shape = SHAPES[name]
    first = make_weight(kind, shape)
    num_bytes = sum(part.nbytes for part in (first.qweight, first.scales))
    count = max(-(-MIN_BYTES // num_bytes), MIN_CALLS)
    weights = [first, *(make_weight(kind, shape) for _ in range(count - 1))]
    cases = []
    for num_rows in rows:
        x = torch.randn(num_rows, shape.num_in, device="cuda", dtype=DTYPE)
        ways = one_row_ways(shape, x, weights) if num_rows == 1 else few_ways(shape, x, weights)
        label = f"{kind} {name} {shape.num_out} x {shape.num_in}, {num_rows} rows"
        num_flops = 2 * shape.num_out * shape.num_in * num_rows
        expected, rounded = partial(expect, shape, x, first), partial(quantized, x, first)
        others = rounding_ways(x, weights) if num_rows > 1 else {}
        cases.append(Case(label, num_bytes, num_flops, expected, ways, rounded, others))
    return cases


def make_weight(kind: str, shape: Shape) -> QuantizedWeight:
    num_out, num_in = shape.num_out, shape.num_in
    if kind == "fp8":
        qweight = torch.randn(num_out, num_in, device="cuda", dtype=DTYPE).mul_(64).to(FP8)
        scales = torch.rand(num_out, 1, device="cuda").add_(1).div_(64 * num_in**0.5)
        return QuantizedWeight(8, qweight.view(torch.int32), scales, None, num_in)
    limit = 2**31
    words = torch.randint(-limit, limit, (num_out, num_in // 8), device="cuda").int()
    scales = torch.rand(num_out, num_in // BLOCK, device="cuda").add_(1).div_(6 * num_in**0.5)
    return QuantizedWeight(4, words, scales.to(DTYPE), None, num_in)


def norm_of(shape: Shape) -> NormWeights | None:
    ones = torch.ones(shape.num_in, device="cuda")
    return None if shape.is_summed else NormWeights(ones, 1e-6)


def expect(shape: Shape, x: Tensor, weight: QuantizedWeight) -> Tensor:
    norm = norm_of(shape)
    if len(x) == 1 and norm is not None:
        x = TorchOps().norm(ResidualStream(x), norm)[0]
    y = functional.linear(x, weight.dequantize(DTYPE))
    return y if shape.activation is None else TorchOps().act_and_mul(y, shape.activation)


def one_row_ways(
    shape: Shape, x: Tensor, weights: Sequence[QuantizedWeight]
) -> dict[str, list[Run]]:
    norm = norm_of(shape)

    def run(weight: QuantizedWeight, config: OneRowConfig) -> Tensor:
        return one_row_linear(ResidualStream(x), norm, weight, None, shape.activation, config)[0]

    chosen = one_row_config(weights[0], norm is not None, shape.activation is not None)
    whole = 1 << (shape.num_in - 1).bit_length()
    configs = {f"chosen {asdict(chosen)}": chosen}
    for block_out, block_in, num_warps, programs in ONE_ROW:
        if block_in == 0 or norm is None:
            config = OneRowConfig(block_out, block_in or min(whole, 4096), num_warps, programs)
            configs[json.dumps(asdict(config))] = config
    return {
        name: [partial(run, weight, config) for weight in weights]
        for name, config in configs.items()
    }


def few_ways(shape: Shape, x: Tensor, weights: Sequence[QuantizedWeight]) -> dict[str, list[Run]]:
    counters = make_counters(x.device)

    def run(weight: QuantizedWeight, config: FewRowsConfig) -> Tensor:
        finish = None if shape.is_summed else counters
        return few_rows_linear(x, weight, None, shape.activation, finish, config)

    chosen = few_rows_config(weights[0], len(x))
    configs = {f"chosen {asdict(chosen)}": chosen}
    rows = min(max(16, 1 << (len(x) - 1).bit_length()), 128)
    for tile, num_splits in itertools.product(TILES[rows], NUM_SPLITS):
        config = FewRowsConfig(*tile[:2], BLOCK, *tile[2:], num_splits)
        num_tiles = -(-shape.num_out // config.block_out) * -(-len(x) // config.block_rows)
        if num_tiles <= len(counters) or num_splits == 1:
            configs[json.dumps(asdict(config))] = config
    ways = {
        name: [partial(run, weight, config) for weight in weights]
        for name, config in configs.items()
    }
    if shape.activation is None:
        plain = weights[0].dequantize(DTYPE)
        others = [torch.randn_like(plain) for _ in range(MIN_BYTES // plain.nbytes)]
        ways["cuBLAS bf16"] = [partial(functional.linear, x, w) for w in (plain, *others)]
    return ways


def quantized(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return quantized_product(x, weight, None)


def rounding_ways(x: Tensor, weights: Sequence[QuantizedWeight]) -> dict[str, list[Run]]:
    """Return calls of the library's FP8 product with quantized activations, without a gate."""
    ready = [scaled_mm_weight(weight) for weight in weights if weight.bits == 8]
    calls = [
        partial(fp8_many_rows, x, weight, None, None) for weight in ready if weight is not None
    ]
    return {"library fp8": calls} if calls else {}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    kinds, names = ["fp8", "int4"], list(SHAPES)
    add("--weights", nargs="+", choices=kinds, default=kinds, metavar="NAME", help=str(kinds))
    add("--shapes", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    rows = [1, 8, 64, 256]
    text = "rows of x (default: 1 8 64 256)"
    add("--rows", nargs="+", type=at_least(1), default=rows, metavar="N", help=text)
    processes = os.cpu_count() or 1
    add("--processes", type=at_least(1), default=processes, metavar="N", help="compile processes")
    add("--json", metavar="FILE", help="append all times as lines of JSON (default: none)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
