"""Every weight layout of platforms/cpu_linear.py over a whole model's projections.

    python -m benchmarks.cpu_linear

Uses SmolLM2's shapes with random weights, all layers in turn, so that weights come from memory as
they do in a decode step. Candidates take turns; the best round of each is shown.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from nanovllm.platforms import cpu_linear
from nanovllm.platforms.base import LinearFn

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
NUM_LAYERS = 30
NUM_ROUNDS = 6
LAYOUTS = ("pack_rows", "pack_columns", "pack_onednn", "pack_twice")


def main() -> None:
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            weights = [torch.randn(shape).to(dtype) for shape in SHAPES * NUM_LAYERS + [HEAD]]
            models = {name: pack(name, weights) for name in LAYOUTS if is_available(name, dtype)}
            for num_rows in (1, 16, 256):
                report(models, weights, num_rows)


def is_available(name: str, dtype: torch.dtype) -> bool:
    return name != "pack_twice" or dtype == torch.bfloat16


def pack(name: str, weights: list[Tensor]) -> list[LinearFn]:
    layout = getattr(cpu_linear, name)
    return [layout(weight, None) for weight in weights]


def report(models: dict[str, list[LinearFn]], weights: list[Tensor], num_rows: int) -> None:
    dtype = weights[0].dtype
    inputs = [torch.randn(num_rows, weight.shape[1]).to(dtype) for weight in weights]
    best = dict.fromkeys(models, float("inf"))
    for _ in range(NUM_ROUNDS if num_rows < 256 else 2):
        for name, linears in models.items():
            start = time.perf_counter()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            best[name] = min(best[name], time.perf_counter() - start)
    num_bytes = sum(weight.nbytes for weight in weights)
    for name, seconds in best.items():
        speed = f"{seconds * 1e3:7.1f} ms, {num_bytes / seconds / 1e9:5.1f} GB/s of weights"
        print(f"{str(dtype).removeprefix('torch.'):8s} {num_rows:3d} rows  {name:12s} {speed}")


if __name__ == "__main__":
    main()
