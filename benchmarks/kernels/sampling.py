"""Sampling on a GPU: microseconds of each variant, beside the floor of one reading of the logits.

    python -m benchmarks.kernels.sampling

`full` runs three kinds of rows: top_k, top_p on peaked logits (their cut lies among a row's largest
few thousand) and top_p on flat ones (it does not). Copies of the logits take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import GpuTimer, floor, line
from nanovllm.cli.exit_code import exit_code
from nanovllm.kernels.cuda.sampling import sample_tokens, sampling_workspace
from nanovllm.kernels.ops import Sampling
from nanovllm.kernels.torch_sampling import SamplingColumns

FULL = Sampling.NOISE | Sampling.MIN_P | Sampling.TOP
VOCAB_SIZE = 151_936
MIN_BYTES = 400_000_000  # of the logits that take turns: several times the L2 cache


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


def main() -> int:
    timer = GpuTimer()
    for num_rows in (1, 64, 256):
        num_bytes = num_rows * VOCAB_SIZE * 2
        generator = torch.Generator("cuda").manual_seed(0)
        normal = torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator)
        for case in CASES:
            logits = (normal * case.scale).bfloat16()
            copies = [logits.clone() for _ in range(-(-MIN_BYTES // num_bytes))]
            sample = sampler(case, num_rows)
            took = timer.microseconds([partial(sample, each) for each in copies])
            label = f"{num_rows:4d} rows  {case.name:28s}"
            print(line(label, {"ours": took}, floor(num_bytes, 0)), flush=True)
    return 0


def sampler(case: Case, num_rows: int) -> Callable[[Tensor], Tensor]:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    columns = SamplingColumns(
        column(case.temperature),
        column(case.top_k, torch.int32),
        column(case.top_p),
        column(case.min_p),
        torch.arange(num_rows, device="cuda"),
    )
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    out, workspace = torch.empty_like(slots), sampling_workspace(num_rows, VOCAB_SIZE, "cuda")

    def sample(logits: Tensor) -> Tensor:
        sample_tokens(logits, slots, columns, slots, case.asked, out, workspace)
        return out

    return sample


if __name__ == "__main__":
    sys.exit(exit_code(main))
