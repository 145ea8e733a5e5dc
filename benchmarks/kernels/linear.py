"""Time projections on a GPU in microseconds: cuBLAS, the engine's kernels and the floor.

    python -m benchmarks.kernels.linear [--models qwen3-8b ...] [--rows 1 64 ...]

Times are medians over replays of a CUDA graph that rotates through enough weights to defeat the L2
cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import GpuTimer, floor, line
from benchmarks.models import model_names, model_path
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.config import ModelConfig
from nanovllm.devices.cuda.kernels import elementwise
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.models.config_json import read_model_config

ROWS = [1, 8, 32, 64, 128, 256]
DTYPE = torch.bfloat16
MIN_BYTES, MIN_CALLS = 420_000_000, 8  # total weight size and calls per graph


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [num_out, num_in]; a gated one holds gate and up."""

    num_out: int
    num_in: int
    is_gated: bool = False
    is_summed: bool = False  # a norm follows, which may add up the partial sums

    @property
    def num_bytes(self) -> int:
        return self.num_out * self.num_in * DTYPE.itemsize


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    for shape, names in shapes_by_name(args.models).items():
        print(f"{shape.num_out} x {shape.num_in}: {', '.join(names)}")
        weights = make_weights(shape, torch.device("cuda"))
        for num_rows in args.rows:
            x = torch.randn(num_rows, shape.num_in, device="cuda", dtype=DTYPE)
            ways = {"cuBLAS": library, "ours": chosen}
            calls = {
                name: [partial(run, shape, x, weight) for weight in weights]
                for name, run in ways.items()
            }
            times = timer.measure(calls, library(shape, x, weights[0]))
            label = f"{num_rows:>5} rows"
            best = floor(shape.num_bytes, shape.num_bytes * num_rows)  # 2 FLOPs per element
            print(line(label, times, best), flush=True)
    return 0


def shapes_by_name(models: list[str]) -> dict[Shape, list[str]]:
    """Return each distinct shape with the projections that have it."""
    names: dict[Shape, list[str]] = {}
    for model in models:
        config = read_model_config(json.loads(Path(model_path(model)).read_text()))
        for name, shape in shapes_of(config).items():
            names.setdefault(shape, []).append(f"{model} {name}")
    return names


def shapes_of(config: ModelConfig) -> dict[str, Shape]:
    """Return the projections of a model, keyed by name."""
    hidden_size, inner_size = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {
        "qkv": Shape(q_size + 2 * kv_size, hidden_size),
        "o": Shape(hidden_size, q_size, is_summed=True),
        "gate_up": Shape(2 * inner_size, hidden_size, is_gated=True),
        "down": Shape(hidden_size, inner_size, is_summed=True),
        "head": Shape(config.vocab_size, hidden_size),
    }


def make_weights(shape: Shape, device: torch.device) -> list[Tensor]:
    num_weights = -(-MIN_BYTES // shape.num_bytes)
    size = shape.num_out, shape.num_in
    weights = [torch.randn(size, device=device, dtype=DTYPE) for _ in range(num_weights)]
    return weights * -(-MIN_CALLS // num_weights)


def library(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    y = functional.linear(x, weight)
    return elementwise.act_and_mul(y, "silu") if shape.is_gated else y


def chosen(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    """Run the projection as the engine does."""
    activation = "silu" if shape.is_gated else None
    packed = TritonOps().pack_linear(weight, None, activation, allow_copy=False)
    if not shape.is_summed:
        return packed(x)
    residual = torch.empty(len(x), shape.num_out, device=x.device, dtype=x.dtype)
    hidden = packed.add_to(residual, x)
    return hidden.residual if hidden.update is None else hidden.update


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = model_names()
    text = f"one or more of {', '.join(models)} (default: all)"
    add("--models", nargs="+", choices=models, default=models, metavar="NAME", help=text)
    text = "rows of x (default: 1 8 32 64 128 256)"
    add("--rows", nargs="+", type=at_least(1), default=ROWS, metavar="N", help=text)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
