"""Time of the CUDA sampling kernels for each variant, replayed as a graph.

    python -m benchmarks.sampling

`full` runs three kinds of rows: top_k, top_p on peaked logits (their cut lies among a row's largest
few thousand) and top_p on flat ones (it does not). The floor is one reading of the logits.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels.cuda.sampling import sample_tokens, sampling_workspace
from nanovllm.kernels.ops import Sampling
from nanovllm.kernels.torch_sampling import SamplingColumns

FULL = Sampling.NOISE | Sampling.MIN_P | Sampling.TOP
VOCAB_SIZE = 151_936
BYTES_PER_MS = 4.28e9  # what a device copy moves on an H200
NUM_REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    asked: Sampling
    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    scale: float = 4.0  # of normally distributed logits


CASES = (
    Case("greedy", Sampling.GREEDY, temperature=0.0),
    Case("plain", Sampling.NOISE),
    Case("min_p", Sampling.NOISE | Sampling.MIN_P, min_p=0.05),
    Case("full, top_k 20, top_p 0.95", FULL, top_k=20, top_p=0.95),
    Case("full, top_p 0.95, peaked", FULL, top_p=0.95),
    Case("full, top_p 0.95, flat", FULL, top_p=0.95, temperature=1.0, scale=1.0),
    Case("full, nothing to cut", FULL),
)


def main() -> None:
    if not torch.cuda.is_available():
        print("benchmarks.sampling times CUDA kernels, and there is no CUDA device here")
        return
    print(f"{torch.cuda.get_device_name()}, {VOCAB_SIZE:,} bfloat16 logits a row")
    for num_rows in (1, 64, 256):
        floor = num_rows * VOCAB_SIZE * 2 / BYTES_PER_MS
        for case in CASES:
            took = time_case(case, num_rows)
            print(f"{num_rows:4d} rows  {case.name:28s} {took:7.4f} ms  (floor {floor:.4f})")


def time_case(case: Case, num_rows: int) -> float:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator) * case.scale
    logits = logits.bfloat16()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    columns = columns_of(case, num_rows)
    out = torch.empty_like(slots)
    workspace = sampling_workspace(num_rows, VOCAB_SIZE, "cuda")
    spoiler = torch.empty(1 << 26, dtype=torch.int32, device="cuda")  # several times the L2 cache

    def step() -> None:
        sample_tokens(logits, slots, columns, slots, case.asked, out, workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return statistics.median(time_replay(graph, spoiler) for _ in range(NUM_REPLAYS))


def columns_of(case: Case, num_rows: int) -> SamplingColumns:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return SamplingColumns(
        column(case.temperature),
        column(case.top_k, torch.int32),
        column(case.top_p),
        column(case.min_p),
        torch.arange(num_rows, device="cuda"),
    )


def time_replay(graph: torch.cuda.CUDAGraph, spoiler: Tensor) -> float:
    """Milliseconds of one replay that finds none of its data in the cache."""
    spoiler.zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


if __name__ == "__main__":
    main()
