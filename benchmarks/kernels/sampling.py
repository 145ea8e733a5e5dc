"""Time each sampling variant on a GPU; the floor is the time to read the logits once.

    python -m benchmarks.kernels.sampling

`full` covers top_k, top_p on peaked logits (the cutoff is among a row's largest few thousand
values) and top_p on flat logits (it is not). The graph rotates through copies of the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import GpuTimer, floor, line
from nanovllm.cli.exit_code import exit_code
from nanovllm.devices.cuda.kernels.sampling import sample_tokens, sampling_workspace
from nanovllm.ops.interface import Sampling
from nanovllm.ops.torch_sampling import SamplingColumns

FULL = Sampling.RANDOM | Sampling.MIN_P | Sampling.TOP_K_TOP_P
VOCAB_SIZE = 151_936
DTYPES = (
    torch.float32,
    torch.int32,
    torch.float32,
    torch.float32,
)  # of temperature, top_k, top_p, min_p
MIN_BYTES = 400_000_000  # total size of the copies: several times the L2 cache


# Sampling mode, scale of the normally distributed logits, temperature, top_k, top_p, min_p.
CASES = {
    "greedy": (Sampling.GREEDY, 4.0, 0.0, 0, 1.0, 0.0),
    "plain": (Sampling.RANDOM, 4.0, 0.6, 0, 1.0, 0.0),
    "min_p": (Sampling.RANDOM | Sampling.MIN_P, 4.0, 0.6, 0, 1.0, 0.05),
    "full, top_k 20, top_p 0.95": (FULL, 4.0, 0.6, 20, 0.95, 0.0),
    "full, top_p 0.95, peaked": (FULL, 4.0, 0.6, 0, 0.95, 0.0),
    "full, top_p 0.95, flat": (FULL, 1.0, 1.0, 0, 0.95, 0.0),
    "full, nothing to cut": (FULL, 4.0, 0.6, 0, 1.0, 0.0),
}


def main() -> int:
    timer = GpuTimer()
    for num_rows in (1, 64, 256):
        num_bytes = num_rows * VOCAB_SIZE * 4
        generator = torch.Generator("cuda").manual_seed(0)
        normal = torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator)
        for name, (asked, scale, *params) in CASES.items():
            logits = normal * scale
            copies = [logits.clone() for _ in range(-(-MIN_BYTES // num_bytes))]
            sample = sampler(asked, params, num_rows)
            took = timer.microseconds([partial(sample, each) for each in copies])
            label = f"{num_rows:4d} rows  {name:28s}"
            print(line(label, {"ours": took}, floor(num_bytes, 0)), flush=True)
    return 0


def sampler(asked: Sampling, params: list[float], num_rows: int) -> Callable[[Tensor], Tensor]:
    temperature, top_k, top_p, min_p = (
        torch.full((num_rows,), value, dtype=dtype, device="cuda")
        for value, dtype in zip(params, DTYPES, strict=True)
    )
    seeds = torch.arange(num_rows, device="cuda")
    columns = SamplingColumns(temperature, top_k, top_p, min_p, seeds)
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    out, workspace = torch.empty_like(slots), sampling_workspace(num_rows, VOCAB_SIZE, "cuda")

    def sample(logits: Tensor) -> Tensor:
        sample_tokens(logits, slots, columns, slots, asked, out, workspace)
        return out

    return sample


if __name__ == "__main__":
    sys.exit(exit_code(main))
