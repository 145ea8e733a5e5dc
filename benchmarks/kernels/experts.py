"""Time the engine's MoE kernels on a GPU in microseconds, and compare them to the floor.

    python -m benchmarks.kernels.experts [--tokens 1 ...] [--shape 128 8 2048 768] [--weights NAME]

Times are medians over replays of a CUDA graph that rotates through layers to defeat the L2 cache.
"pairs" (unquantized weights only) and "sorted" are the two implementations, and "ours" is the one
that the engine chooses. The floor is the time to read each chosen expert once or to multiply,
whichever is longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import quantized_linear
from benchmarks.kernels.timing import GpuTimer, floor, line
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.devices.cuda.kernels.dequantize import CudaWeight
from nanovllm.devices.cuda.kernels.experts_grouped import run_grouped
from nanovllm.devices.cuda.kernels.experts_pairs import route, run_pairs
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.ops.interface import Ops, PackedExperts, Routing
from nanovllm.ops.torch_experts import route as reference_route
from nanovllm.ops.torch_ops import TorchOps

DTYPE = torch.bfloat16
TOKENS = [1, 2, 4, 8, 16, 64, 256, 512, 4096]
SHAPE = [128, 8, 2048, 768]  # of Qwen3-30B-A3B: experts, top_k, hidden size, expert size
MAX_PAIR_TOKENS = 32
NUM_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Layer:
    logits: Tensor  # [tokens, experts]
    gate_up: CudaWeight
    down: CudaWeight


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    num_experts, top_k, hidden, size = args.shape
    print(f"{top_k} of {num_experts} experts, {hidden} x {size}, {args.weights}", flush=True)
    weights = [make_weights(args.weights, *args.shape) for _ in range(NUM_LAYERS)]
    routing = Routing(top_k, is_normalized=True)
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, hidden, device="cuda", dtype=DTYPE)
        logits = torch.randn(NUM_LAYERS, num_tokens, num_experts, device="cuda", dtype=DTYPE)
        layers = [Layer(own, *each) for own, each in zip(logits, weights, strict=True)]
        first = layers[0]
        expected = reference(x, first, routing)
        ways = {"ours": chosen, "sorted": grouped}
        if num_tokens <= MAX_PAIR_TOKENS and args.weights == "bf16":
            ways["pairs"] = pairs
        calls = {
            name: [partial(run, x, layer, routing) for layer in layers]
            for name, run in ways.items()
        }
        best = statistics.mean(layer_floor(layer, routing) for layer in layers)
        times = timer.measure(calls, expected)
        print(line(f"{num_tokens:>5} tokens", times, best), flush=True)
    return 0


def make_weights(
    kind: str, num_experts: int, top_k: int, hidden: int, size: int
) -> tuple[CudaWeight, CudaWeight]:
    if kind != "bf16":
        gate_up_shape = quantized_linear.Shape(num_experts * 2 * size, hidden)
        down_shape = quantized_linear.Shape(num_experts * hidden, size)
        return quantized_linear.make_weight(kind, gate_up_shape), quantized_linear.make_weight(
            kind, down_shape
        )
    gate_up = torch.empty(num_experts, 2 * size, hidden, device="cuda", dtype=DTYPE)
    down = torch.empty(num_experts, hidden, size, device="cuda", dtype=DTYPE)
    return gate_up.normal_(std=hidden**-0.5), down.normal_(std=size**-0.5)


def reference(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    return pack(TorchOps(), layer, routing)(x, layer.logits)


def chosen(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    return pack(TritonOps(), layer, routing)(x, layer.logits)


def pack(ops: Ops, layer: Layer, routing: Routing) -> PackedExperts:
    return ops.pack_experts(layer.gate_up, layer.down, routing)


def pairs(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    ids, weights, _ = route(layer.logits, routing)
    return run_pairs(x, ids, weights, layer.gate_up, layer.down)


def grouped(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    return run_grouped(x, layer.logits, layer.gate_up, layer.down, routing, None)


def layer_floor(layer: Layer, routing: Routing) -> float:
    ids, _ = reference_route(layer.logits, routing)
    num_experts = layer.logits.shape[1]
    per_expert = sum(num_bytes(weight) for weight in (layer.gate_up, layer.down)) / num_experts
    shapes = [weight.shape for weight in (layer.gate_up, layer.down)]
    num_elements = sum(math.prod(shape) for shape in shapes) / num_experts
    return floor(len(ids.unique()) * per_expert, 2 * num_elements * ids.numel())


def num_bytes(weight: CudaWeight) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.qweight.nbytes + weight.scales.nbytes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = f"default: {' '.join(map(str, TOKENS))}"
    add("--tokens", nargs="+", type=at_least(1), default=TOKENS, metavar="N", help=text)
    text = "experts, top_k, hidden size, expert size (default: Qwen3-30B-A3B)"
    add("--shape", nargs=4, type=at_least(1), default=SHAPE, metavar="N", help=text)
    kinds = ["bf16", "fp8", "int4"]
    add("--weights", choices=kinds, default="bf16", help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
