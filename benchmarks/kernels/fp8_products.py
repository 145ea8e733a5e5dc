"""Time FP8 x FP8 products on a GPU, scaled by the library or by the next kernel.

    python -m benchmarks.kernels.fp8_products [--rows 64 128 256] [--shapes qkv o gate_up down]

Shapes are Qwen3-8B's. A product is timed with its neighbors in a layer: the kernel that quantizes
its input rows, and the norm or gate that follows. The time of these neighbors alone, and that of a
product with unquantized rows, are printed too. Times are medians over replays of a CUDA graph
that rotates through enough weights to defeat the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.floors import Rates
from benchmarks.kernels.quantized_linear import SHAPES, Shape, make_weight
from benchmarks.kernels.timing import GpuTimer, Run, line
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.devices.cuda.kernels.elementwise import act_and_mul, rms_norm
from nanovllm.devices.cuda.kernels.linear_few_rows import few_rows_linear, make_counters
from nanovllm.devices.cuda.kernels.linear_fp8 import (
    MAX_SUM_ROWS,
    ScaledMMWeight,
    fp8_add_to,
    fp8_after_norm,
    fp8_norm,
    fp8_quantize,
    scaled_mm_weight,
)
from nanovllm.ops.interface import NormWeights, ResidualStream

DTYPE = torch.bfloat16
MIN_BYTES = 200_000_000  # total size of the weights that a graph rotates through
MAX_DEQUANTIZED_ROWS = 64  # maximum rows for the kernel that dequantizes the weight


@dataclass(frozen=True, slots=True)
class Case:
    """A norm and a product or, if `shape.is_summed`, quantization, a product and a norm."""

    shape: Shape
    x: Tensor
    residual: Tensor
    weights: Sequence[ScaledMMWeight]
    norm_in: NormWeights
    norm_out: NormWeights

    def scaled_after(self, weight: ScaledMMWeight) -> Tensor:
        if self.shape.is_summed:
            return fp8_norm(fp8_add_to(self.residual, self.x, weight, None), self.norm_out).scales
        activation = self.shape.activation
        return fp8_after_norm(ResidualStream(self.x), self.norm_in, weight, None, activation)

    def scaled_by_library(self, weight: ScaledMMWeight) -> Tensor:
        is_summed, activation = self.shape.is_summed, self.shape.activation
        rows = (
            fp8_quantize(self.x, False)
            if is_summed
            else fp8_norm(ResidualStream(self.x), self.norm_in)
        )
        y: Tensor = torch._scaled_mm(
            rows.values,
            weight.stored.fp8.t(),
            scale_a=rows.scales,
            scale_b=weight.stored.scales.t(),
            out_dtype=DTYPE,
            use_fast_accum=True,
        )
        if is_summed:
            return fp8_norm(ResidualStream(self.residual, y), self.norm_out).scales
        return y if activation is None else act_and_mul(y, activation)

    def without_product(self, y: Tensor) -> Tensor:
        if not self.shape.is_summed:
            fp8_norm(ResidualStream(self.x), self.norm_in)
            return y if self.shape.activation is None else act_and_mul(y, self.shape.activation)
        fp8_quantize(self.x, by_block=False)
        return fp8_norm(ResidualStream(self.residual, y), self.norm_out).scales

    def dequantized(self, counters: Tensor, weight: ScaledMMWeight) -> Tensor:
        if not self.shape.is_summed:
            x = rms_norm(ResidualStream(self.x), self.norm_in)
            return few_rows_linear(x, weight.stored, None, self.shape.activation, counters)
        y = few_rows_linear(self.x, weight.stored, None, None, None)
        return rms_norm(ResidualStream(self.residual, y), self.norm_out)


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    for name in args.shapes:
        shape, weights = SHAPES[name], make_weights(SHAPES[name])
        best = 1e6 * weights[0].stored.qweight.nbytes / Rates().bytes_per_second
        for num_rows in args.rows:
            times = measure(timer, make_case(shape, num_rows, weights))
            print(line(f"{name:<8}{num_rows:>5} rows", times, best), flush=True)
            if args.json is not None:
                kept = {"case": name, "rows": num_rows, "floor": best, "us": times}
                with Path(args.json).open("a") as file:
                    file.write(json.dumps(kept) + "\n")
    return 0


def measure(timer: GpuTimer, case: Case) -> dict[str, float]:
    y = torch.randn(len(case.x), case.shape.num_out, device="cuda", dtype=DTYPE)
    ways: dict[str, list[Run]] = {
        "without product": [partial(case.without_product, y)] * 8,
        "scaled by the library": [partial(case.scaled_by_library, w) for w in case.weights],
    }
    if len(case.x) <= MAX_SUM_ROWS:
        ways["scaled after"] = [partial(case.scaled_after, weight) for weight in case.weights]
    if len(case.x) <= MAX_DEQUANTIZED_ROWS:
        counters = make_counters(case.x.device)
        ways["unquantized rows"] = [partial(case.dequantized, counters, w) for w in case.weights]
    return {name: timer.microseconds(calls) for name, calls in ways.items()}


def make_weights(shape: Shape) -> list[ScaledMMWeight]:
    count = max(-(-MIN_BYTES // (shape.num_out * shape.num_in)), 2)
    made = [make_weight("fp8", shape) for _ in range(count)]
    ready = [scaled_mm_weight(weight) for weight in made if weight.bits == 8]
    return [weight for weight in ready if weight is not None]


def make_case(shape: Shape, num_rows: int, weights: Sequence[ScaledMMWeight]) -> Case:
    num_in, num_out = shape.num_in, shape.num_out
    x = torch.randn(num_rows, num_in, device="cuda", dtype=DTYPE)
    residual = torch.randn(num_rows, num_out, device="cuda", dtype=DTYPE)
    norms = [NormWeights(torch.ones(size, device="cuda"), 1e-6) for size in (num_in, num_out)]
    return Case(shape, x, residual, weights, *norms)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, list(SHAPES)
    add("--shapes", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    rows = [16, 32, 64, 96, 128, 160, 192, 224, 256, 1024]
    add("--rows", nargs="+", type=at_least(2), default=rows, metavar="N", help=f"of x ({rows})")
    add("--json", metavar="FILE", help="append all times as lines of JSON (default: none)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
