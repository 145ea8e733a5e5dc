"""Projections on a GPU: microseconds of cuBLAS and of the engine's kernels, beside the floor.

    python -m benchmarks.kernels.linear [--models qwen3-8b ...] [--rows 1 64 ...] [--sweep]

Times are medians over replays of a CUDA graph, in which so many weights take turns that the cache
does not help. --sweep adds the best three other configurations: of one row 2x4096w8 (outputs x
inputs of a tile, warps), of more 16x64s8p2 (rows x inputs of a tile, stages, parts).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import GpuTimer, floor, line
from nanovllm.bench.models import model_names, model_path
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.config import ModelConfig
from nanovllm.kernels.cuda import elementwise
from nanovllm.kernels.cuda import linear_few_rows as few_rows
from nanovllm.kernels.cuda import linear_one_row as skinny
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.models.config_json import read_model_config

ROWS = [1, 8, 32, 64, 128, 256]
DTYPE = torch.bfloat16
MIN_BYTES, MIN_CALLS = 420_000_000, 8  # of the weights that take turns; in one graph
TILE_ELEMENTS = (1024, 16384)  # of the weight that a program of one row holds: fewest, most
NUM_STAGES = (3, 5, 8)

Project = Callable[[Tensor, Tensor], Tensor]  # x [rows, in], weight [out, in]


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [num_out, num_in]; a gated one holds gate and up."""

    num_out: int
    num_in: int
    is_gated: bool = False
    is_summed: bool = False  # a norm follows, which may be left to finish the sum

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
            expected = library(shape, x, weights[0])
            variants = {
                name: [partial(run, x, weight) for weight in weights]
                for name, run in projections(shape, x, args.sweep).items()
            }
            times = timer.measure(variants, expected)
            label = f"{num_rows:>5} rows"
            best = floor(shape.num_bytes, shape.num_bytes * num_rows)  # two operations an element
            print(line(label, times, ("cuBLAS", "ours"), best), flush=True)
    return 0


def shapes_by_name(models: list[str]) -> dict[Shape, list[str]]:
    """Each shape that occurs, once, and the projections that have it."""
    names: dict[Shape, list[str]] = {}
    for model in models:
        config = read_model_config(json.loads(Path(model_path(model)).read_text()))
        for name, shape in shapes_of(config).items():
            names.setdefault(shape, []).append(f"{model} {name}")
    return names


def shapes_of(config: ModelConfig) -> dict[str, Shape]:
    """The projections of a model by name."""
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


def projections(shape: Shape, x: Tensor, sweep: bool) -> dict[str, Project]:
    found: dict[str, Project] = {"cuBLAS": partial(library, shape), "ours": partial(chosen, shape)}
    if sweep:
        found |= one_row_candidates(shape) if len(x) == 1 else few_rows_candidates(shape, x)
    return found


def library(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    y = functional.linear(x, weight)
    return elementwise.gate(y, "silu") if shape.is_gated else y


def chosen(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    """What the engine runs."""
    activation = "silu" if shape.is_gated else None
    packed = TritonOps().pack_linear(weight, None, activation, has_room=False)
    if not shape.is_summed:
        return packed(x)
    residual = torch.empty(len(x), shape.num_out, device=x.device, dtype=x.dtype)
    summands = packed.summands(x, residual)
    return residual if summands is None else summands


def one_row_candidates(shape: Shape) -> Iterator[tuple[str, Project]]:
    fewest, most = TILE_ELEMENTS
    activation = "silu" if shape.is_gated else None
    for config in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (4, 8)):
        block_out, block_in, num_warps = config

        def run(x: Tensor, weight: Tensor, config: tuple[int, int, int] = config) -> Tensor:
            with patch.object(skinny, "skinny_config", lambda *_: config):
                return skinny.skinny_linear(x, weight, None, activation=activation)[0]

        is_useful = block_in <= triton.next_power_of_2(shape.num_in)
        if is_useful and fewest <= block_out * block_in <= most:
            yield f"{block_out}x{block_in}w{num_warps}", run


def few_rows_candidates(shape: Shape, x: Tensor) -> Iterator[tuple[str, Project]]:
    """Blocks that hold all rows or half of them; parts where the norm may finish the sum."""
    activation = "silu" if shape.is_gated else None
    whole = min(max(16, triton.next_power_of_2(len(x))), 128)
    blocks = sorted({whole, max(16, whole // 2)})
    parts = (1, 2, 4, 8) if shape.is_summed else (1,)
    for num_parts, block, tile in itertools.product(parts, blocks, (64, 128)):
        part_len = shape.num_in // num_parts
        stage_bytes = (few_rows.LINES + block) * tile * DTYPE.itemsize
        most = min(few_rows.shared_bytes(x.device) // stage_bytes, part_len // tile + 1)
        default = few_rows.few_rows_config(len(x), part_len, x)
        for num_stages in sorted({min(num_stages, most) for num_stages in NUM_STAGES}):
            config = replace(default, num_rows=block, tile=tile, num_stages=num_stages)
            options = {"activation": activation, "num_parts": num_parts, "config": config}
            run = partial(few_rows.few_rows_linear, bias=None, **options)
            yield f"{block}x{tile}s{num_stages}p{num_parts}", run


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
