"""Cases for Gated DeltaNet: run by Triton's interpreter on the CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import torch

from nanovllm.config import RecurrentConfig
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.ops.interface import RecurrentRows
from nanovllm.ops.torch_delta_net import split_chunks
from nanovllm.ops.torch_ops import TorchOps
from tests.devices.cuda.kernels.interpreted.fused_cases import TOLERANCE
from tests.ops.delta_nets import random_inputs, random_state

# The sizes of a RecurrentConfig, and whether value heads are tiled.
SIZES = ((3, 6, 12, 8, 4), (2, 4, 40, 24, 3, True), (1, 1, 16, 16, 2))
LARGE = (2, 6, 72, 40, 3, True), (4, 8, 128, 128, 4)  # the latter: a rank of Qwen3.5


def check_gated_delta_net(
    dtype: torch.dtype, device: str, sizes: tuple[tuple[int, ...], ...]
) -> None:
    """Outputs and states equal the reference's, for rows of one token and beside longer rows."""
    for numbers, counts in itertools.product(sizes, (None, [1, 5, 2, 1, 150])):
        config = RecurrentConfig(frozenset(), *numbers)
        slots, chunks = torch.tensor([4, 0, 6, 2, 1], device=device), None
        if counts is not None:
            table = split_chunks(slots.cpu().numpy(), np.array(counts))
            padding = np.array([[3, 0, 0, 0]], np.int32)
            chunks = torch.from_numpy(np.concatenate((table, padding))).to(device)
        rows = RecurrentRows(slots, counts, chunks)
        inputs, weights = random_inputs(config, sum(counts or [1] * 5), dtype, device)
        results = []
        for ops in (TritonOps(), TorchOps()):
            state = random_state(config, 7, dtype, device)
            y = ops.gated_delta_net(inputs, weights, state, rows)
            results.append((y, state.recurrent, state.conv))
        for got, want in zip(*results, strict=True):
            # Sums are as exact as their largest term. Chunks use the dtype of the inputs.
            tolerance = 4 * TOLERANCE[want.dtype if counts is None else dtype]
            largest = want.abs().max().item()
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * largest)


def main(which: str) -> None:
    if which == "some":
        check_gated_delta_net(torch.float32, "cpu", SIZES)
    else:
        check_gated_delta_net(torch.float16, "cpu", (*SIZES, *LARGE))


if __name__ == "__main__":
    main(sys.argv[1])
