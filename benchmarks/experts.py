"""A layer of experts on a GPU: microseconds of the engine's kernels, beside the floor.

    python -m benchmarks.experts [--tokens 1 64 ...] [--shape 128 8 2048 768] [--sweep]

Times are medians over replays of a CUDA graph, in which layers take turns so that the cache does
not help. "pairs" and "sorted" are the two ways to run them, and "ours" is the one chosen; --sweep
adds the best three other tiles of sorted pairs: 16x64x64w4s8 (rows x outs of the weight x inputs
of a block_in, warps, stages). The floor reads each expert that was chosen once, or multiplies.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import TritonError

from benchmarks import replays
from nanovllm.bench.floors import Rates
from nanovllm.bench.options import at_least
from nanovllm.cli.exit_code import exit_code
from nanovllm.errors import ConfigError
from nanovllm.kernels.cuda.experts_grouped import GroupedConfig, grouped_config, run_grouped
from nanovllm.kernels.cuda.experts_pairs import route, run_pairs
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.kernels.ops import Routing
from nanovllm.kernels.torch_ops import route as reference_route
from nanovllm.kernels.torch_ops import run_experts
from nanovllm.platforms.cuda import CudaPlatform

DTYPE = torch.bfloat16
TOKENS = [1, 2, 4, 8, 16, 64, 256, 512, 4096]
SHAPE = [128, 8, 2048, 768]  # Qwen3-30B-A3B's: experts, of which chosen, hidden size, expert size
MAX_PAIR_TOKENS = 32
NUM_LAYERS, NUM_SHOWN = 6, 3
MAX_ERROR = 0.02  # distance from the reference, relative to its length


@dataclass(frozen=True, slots=True)
class Layer:
    gate_up: Tensor
    down: Tensor
    logits: Tensor  # [tokens, experts]


Variant = Callable[[Tensor, Layer], Tensor]


def main() -> int:
    args = parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("these are kernels of a GPU, and this machine has no CUDA device")
    platform = CudaPlatform(gpu_memory_utilization=1.0)
    # Graphs share a pool of memory, which lasts as long as one of them does.
    keeps_pool = platform.record(lambda: torch.zeros(1, device=platform.device))
    num_experts, top_k, hidden, size = args.shape
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, us", flush=True)
    print(f"{top_k} of {num_experts} experts, {hidden} x {size}", flush=True)
    weights = [make_weights(num_experts, hidden, size, platform.device) for _ in range(NUM_LAYERS)]
    routing = Routing(top_k, is_normalized=True)
    for num_tokens in args.tokens:
        shape = num_tokens, num_experts
        layers = [Layer(*each, torch.randn(shape, device="cuda", dtype=DTYPE)) for each in weights]
        measure(layers, num_tokens, routing, args.sweep, platform)
    del keeps_pool
    return 0


def make_weights(
    num_experts: int, hidden: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    gate_up = torch.empty(num_experts, 2 * size, hidden, device=device, dtype=DTYPE)
    down = torch.empty(num_experts, hidden, size, device=device, dtype=DTYPE)
    return gate_up.normal_(std=hidden**-0.5), down.normal_(std=size**-0.5)


def measure(
    layers: list[Layer], num_tokens: int, routing: Routing, sweep: bool, platform: CudaPlatform
) -> None:
    """Print a line for a number of tokens; tell of the variants that failed."""
    hidden = layers[0].down.shape[1]
    x = torch.randn(num_tokens, hidden, device=platform.device, dtype=DTYPE)
    first = layers[0]
    want = run_experts(x, first.logits, first.gate_up, first.down, routing)
    timings = {}
    for name, variant in variants(x, first, routing, sweep).items():
        why = defect(variant, x, first, want)
        if why is None:
            timings[name] = microseconds(variant, x, layers, platform)
        else:
            print(f"  {num_tokens} tokens, {name}: {why}", file=sys.stderr)
    cells = [f"{num_tokens:>5} tokens"]
    for name in ("ours", "pairs", "sorted"):
        took = timings.pop(name, None)
        cells.append(f"{name} {'-' if took is None else f'{took:.1f}':>8}")
    cells.append(f"floor {statistics.mean(floor(each, routing) for each in layers):>8.1f}")
    best = sorted(timings.items(), key=lambda item: item[1])[:NUM_SHOWN]
    print("   ".join([*cells, *(f"{name} {took:.1f}" for name, took in best)]), flush=True)


def variants(x: Tensor, layer: Layer, routing: Routing, sweep: bool) -> dict[str, Variant]:
    found: dict[str, Variant] = {"ours": lambda x, layer: run_chosen(x, layer, routing)}
    if len(x) <= MAX_PAIR_TOKENS:
        found["pairs"] = lambda x, layer: run_as_pairs(x, layer, routing)
    found["sorted"] = lambda x, layer: run_sorted(x, layer, routing, None)
    near = grouped_config(len(x) * routing.top_k // len(layer.down), x)
    for config in candidates(near) if sweep else ():
        name = f"{config.block_rows}x{config.block_out}x{config.block_in}"
        name += f"w{config.num_warps}s{config.num_stages}"
        found[name] = lambda x, layer, config=config: run_sorted(x, layer, routing, config)
    return found


def candidates(near: GroupedConfig) -> list[GroupedConfig]:
    """Tiles of half to twice the rows that fit into shared memory and registers."""
    rows = [each for each in (16, 32, 64, 128) if 1 <= 2 * each // near.block_rows <= 4]
    sizes = itertools.product(rows, (64, 128, 256), (64, 128), (4, 8), (3, 4, 6, 8))
    return [
        GroupedConfig(rows, outs, block_in, num_warps, stages)
        for rows, outs, block_in, num_warps, stages in sizes
        if (rows + outs) * block_in * DTYPE.itemsize * stages <= 220 << 10
        and 8 <= rows * outs // (32 * num_warps) <= 128  # sums that a thread holds
    ]


def run_chosen(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    return TritonOps().pack_experts(layer.gate_up, layer.down, routing)(x, layer.logits)


def run_as_pairs(x: Tensor, layer: Layer, routing: Routing) -> Tensor:
    ids, weights, _ = route(layer.logits, routing)
    return run_pairs(x, ids, weights, layer.gate_up, layer.down)


def run_sorted(x: Tensor, layer: Layer, routing: Routing, config: GroupedConfig | None) -> Tensor:
    return run_grouped(x, layer.logits, layer.gate_up, layer.down, routing, config)


def defect(variant: Variant, x: Tensor, layer: Layer, want: Tensor) -> str | None:
    """Why a variant cannot be timed: it does not fit the device, or its result is wrong."""
    try:
        got = variant(x, layer).float()
    except TritonError as error:  # out of shared memory or registers
        return str(error).splitlines()[0]
    distance = float((got - want).norm() / want.float().norm())
    return None if distance < MAX_ERROR else f"wrong by {distance:.1%}"


def microseconds(variant: Variant, x: Tensor, layers: list[Layer], platform: CudaPlatform) -> float:
    """Median time of one layer among others."""

    def run() -> Tensor:
        y = x
        for layer in layers:
            y = variant(x, layer)
        return y

    return replays.microseconds(run, platform) / len(layers)


def floor(layer: Layer, routing: Routing) -> float:
    """Microseconds to read the experts that were chosen or, with many tokens, to multiply them."""
    rates = Rates()
    ids, _ = reference_route(layer.logits, routing)
    per_expert = layer.gate_up[0].numel() + layer.down[0].numel()
    read = len(ids.unique()) * per_expert * DTYPE.itemsize / rates.bytes_per_second
    return 1e6 * max(read, 2 * per_expert * ids.numel() / rates.flops_per_second)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = f"default: {' '.join(map(str, TOKENS))}"
    add("--tokens", nargs="+", type=at_least(1), default=TOKENS, metavar="N", help=text)
    text = "experts, chosen, hidden size, expert size (default: Qwen3-30B-A3B's)"
    add("--shape", nargs=4, type=at_least(1), default=SHAPE, metavar="N", help=text)
    add("--sweep", action="store_true", help="try other tiles too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
