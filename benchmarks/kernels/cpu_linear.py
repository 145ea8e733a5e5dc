"""Products with few rows on the CPU: torch's, by rows and with oneDNN's packed weight, and ours.

    python -m benchmarks.kernels.cpu_linear

Uses the shapes of SmolLM2's projections with random weights, all layers in turn, so that weights
come from memory as they do in a decode step. Candidates take turns; the best round of each counts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import take_turns
from nanovllm.kernels import widened
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.program import Launcher
from nanovllm.kernels.ops import LinearFn
from nanovllm.platforms.cpu_features import find_cpu_features

FEATURES = find_cpu_features()
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
NUM_LAYERS = 30
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
NUM_ROUNDS = 8


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            weights = [torch.randn(shape).to(dtype) for shape in SHAPES * NUM_LAYERS + [HEAD]]
            models: dict[str, list[LinearFn]] = {
                "by rows": [partial(multiply_rows, weight=weight) for weight in weights],
            }
            if dtype in FEATURES.packs:
                models["packed"] = [cpu_ops.pack_onednn(weight, None) for weight in weights]
            ops = cpu_ops.NumbaOps(Launcher(dtype), FEATURES)
            ops.max_linear_rows = max(NUM_ROWS)  # our kernel runs them all
            models["our kernel"] = [
                ops.pack_linear(weight, None, None, has_room=False) for weight in weights
            ]
            for num_rows in NUM_ROWS:
                report(models, weights, num_rows)


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """In the weight's dtype, or widened where that is emulated."""
    return widened.linear(x, weight, None, FEATURES.product_dtype(weight.dtype))


def report(models: dict[str, list[LinearFn]], weights: list[Tensor], num_rows: int) -> None:
    dtype = weights[0].dtype
    inputs = [torch.randn(num_rows, weight.shape[1]).to(dtype) for weight in weights]
    runs = {name: partial(run_all, linears, inputs) for name, linears in models.items()}
    num_bytes = sum(weight.nbytes for weight in weights)
    for name, times in take_turns(runs, NUM_ROUNDS).items():
        speed = f"{min(times) * 1e3:7.1f} ms, {num_bytes / min(times) / 1e9:5.1f} GB/s of weights"
        print(f"{str(dtype).removeprefix('torch.'):8s} {num_rows:2d} rows  {name:13s} {speed}")


def run_all(linears: list[LinearFn], inputs: list[Tensor]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


if __name__ == "__main__":
    main()
