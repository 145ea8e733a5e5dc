"""Time the kernels of a Gated DeltaNet layer for prompts on a GPU, and compare with the reference.

    python -m benchmarks.kernels.delta_net [--prompts 8] [--tokens 2048]

The layer has the shape of Qwen3.5-9B. The error is that of the outputs relative to plain torch in
float32, for the same rounded inputs; the time is for all five kernels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.timing import GpuTimer
from nanovllm.cli.exit_code import exit_code
from nanovllm.config import RecurrentConfig
from nanovllm.ops.interface import DeltaNetInputs, RecurrentRows
from nanovllm.ops.torch_delta_net import gated_delta_net, split_chunks
from tests.ops.delta_nets import random_inputs, random_state

SIZES = RecurrentConfig(frozenset(), 16, 32, 128, 128, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="per prompt")
    args = parser.parse_args()
    timer = GpuTimer()
    from nanovllm.devices.cuda.kernels.delta_net import run_chunks  # needs triton

    counts = [args.tokens] * args.prompts
    slots = np.arange(args.prompts)
    chunks = torch.from_numpy(split_chunks(slots, np.array(counts))).cuda()
    inputs, weights = random_inputs(SIZES, sum(counts), torch.bfloat16, "cuda")
    state = random_state(SIZES, args.prompts, torch.bfloat16, "cuda")

    def run() -> Tensor:
        return run_chunks(inputs, weights, state, chunks)

    wide_inputs = DeltaNetInputs(*(x.float() for x in (inputs.qkv, inputs.z, inputs.b, inputs.a)))
    wide_weights = replace(weights, conv=weights.conv.float())
    wide_state = replace(state, recurrent=state.recurrent.clone(), conv=state.conv.float())
    rows = RecurrentRows(torch.from_numpy(slots).cuda(), counts)
    want = gated_delta_net(wide_inputs, wide_weights, wide_state, rows)
    got = run().float()
    error = float((got - want).norm() / want.norm())
    print(f"{args.prompts} x {args.tokens} tokens: {timer.microseconds([run]):.0f} us, ", end="")
    print(f"error {error:.5f}, not finite: {int((~got.isfinite()).sum())}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
