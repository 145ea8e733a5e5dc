"""Projections of one row: our kernel under several configurations against cuBLAS.

    python -m benchmarks.skinny_linear [--model qwen3-0.6b]

Every layer's weights take part in turn, so that the cache does not help. Needs CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from nanovllm.kernels import skinny_linear
from nanovllm.kernels.base import NormWeights

# Outputs, inputs and whether SiLU follows, per layer; then the LM head.
SHAPES = {
    "qwen3-0.6b": [
        (4096, 1024, False),
        (1024, 2048, False),
        (6144, 1024, True),
        (1024, 3072, False),
    ],
    "qwen3-8b": [
        (6144, 4096, False),
        (4096, 4096, False),
        (24576, 4096, True),
        (4096, 12288, False),
    ],
}
HEADS = {"qwen3-0.6b": (151936, 1024, False), "qwen3-8b": (151936, 4096, False)}
CONFIGS = list(itertools.product((1, 2, 4, 8), (512, 1024, 2048), (4, 8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="qwen3-0.6b")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    for shape in [*SHAPES[args.model], HEADS[args.model]]:
        num_copies = max(1, min(28, (1 << 30) // (shape[0] * shape[1] * 2)))
        weights = [
            torch.randn(shape[:2], device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(num_copies)
        ]
        compare(weights, shape[2])


def compare(weights: list[Tensor], is_gated: bool) -> None:
    num_out, num_in = weights[0].shape
    x = torch.randn(1, num_in, device="cuda", dtype=torch.bfloat16)
    norm = NormWeights(torch.ones(num_in, device="cuda", dtype=torch.bfloat16), 1e-6)
    default = skinny_linear.skinny_config
    gigabytes = weights[0].nbytes * len(weights) / 1e9

    def run(residual: Tensor | None) -> None:
        for weight in weights:
            skinny_linear.skinny_linear(x, weight, None, residual, norm, is_gated)

    print(f"{num_out} x {num_in}{' gated' if is_gated else ''}:", end=" ")
    library = milliseconds(lambda: [F.linear(x, weight) for weight in weights])
    print(f"cuBLAS {1e3 * library / len(weights):.1f} us ({gigabytes / library:.2f} TB/s)")
    results = []
    for config in CONFIGS:
        skinny_linear.skinny_config = lambda *_, config=config: config
        try:
            results.append((milliseconds(lambda: run(x)), config))
        except OutOfResources:  # of shared memory: the tile is too large
            continue
    skinny_linear.skinny_config = default
    results.sort()
    for taken, config in results[:4]:
        print(f"    {config}: {1e3 * taken / len(weights):.1f} us ({gigabytes / taken:.2f} TB/s)")
    print(f"    now {default(num_out // (1 + is_gated), num_in, is_gated)}", flush=True)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a captured run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
