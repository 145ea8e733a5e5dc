"""A layer of experts on the CPU: a loop over them, oneDNN for each, our kernels.

    python -m benchmarks.kernels.cpu_experts [--experts 128] [--tokens 1 64 ...]

Random weights in the shape of Qwen3-30B-A3B's layers, bf16 with all and float32 with half of the
experts. Candidates take turns; medians count. "sum" is how long torch takes to add up the weights
of the experts that were chosen, each of which has to be read once; the last column is our speed.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import take_turns
from nanovllm.kernels.cpu.ops import NumbaOps
from nanovllm.kernels.cpu.program import Launcher
from nanovllm.kernels.ops import PackedExperts, Routing
from nanovllm.kernels.torch_ops import TorchOps, route
from nanovllm.platforms.cpu_features import find_cpu_features

HIDDEN, SIZE, TOP_K = 2048, 768, 8
TOKENS = (1, 8, 64, 128, 256, 1024)
NUM_ROUNDS = 5


def main() -> None:
    args = parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {NUM_ROUNDS} rounds")
    routing = Routing(TOP_K, is_normalized=True)
    with torch.inference_mode():
        for dtype, num_experts in (
            (torch.bfloat16, args.experts),
            (torch.float32, args.experts // 2),
        ):
            gate_up = make(num_experts, 2 * SIZE, HIDDEN, dtype=dtype)
            down = make(num_experts, HIDDEN, SIZE, dtype=dtype)
            features = find_cpu_features()
            ops = NumbaOps(Launcher(dtype), features)
            library = TorchOps(features.product_dtype(dtype))
            ops.max_expert_rows = max(args.tokens) * TOP_K  # our kernels run them all
            candidates = {
                "loop": pack_loop(gate_up, down, routing),
                "oneDNN": library.pack_experts(gate_up, down, routing),
                "ours": ops.pack_experts(gate_up, down, routing),
            }
            for num_tokens in args.tokens:
                report(candidates, gate_up, down, routing, num_tokens)


def pack_loop(gate_up: Tensor, down: Tensor, routing: Routing) -> PackedExperts:
    """As models are often written: a mask for each expert, and a sum in place."""

    def run(x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = route(logits, routing)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, len(down)).permute(2, 1, 0)  # [experts, top_k, tokens]
        for expert in range(len(down)):
            choices, tokens = torch.where(mask[expert])
            gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, tokens, y * weights[tokens, choices, None])
        return out

    return run


def report(
    candidates: dict[str, PackedExperts],
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    num_tokens: int,
) -> None:
    x, logits = (torch.randn(num_tokens, n).to(down.dtype) for n in (HIDDEN, len(down)))
    num_chosen = len(route(logits, routing)[0].unique())
    chosen = gate_up[:num_chosen], down[:num_chosen]
    runs = {name: partial(run, x, logits) for name, run in candidates.items()}
    runs["sum"] = lambda: [weight.view(torch.float32).sum() for weight in chosen]
    times = {n: statistics.median(each) for n, each in take_turns(runs, NUM_ROUNDS).items()}
    cells = [f"{name} {seconds * 1e3:8.2f}" for name, seconds in times.items()]
    ratio = f"loop / ours {times['loop'] / times['ours']:5.2f}"
    speed = f"{sum(weight.nbytes for weight in chosen) / times['ours'] / 1e9:5.1f} GB/s"
    place = f"{down.dtype} {num_tokens:4d} tokens, {num_chosen:3d} experts"
    print(f"{place}, ms: {'  '.join(cells)}   {ratio}   {speed}", flush=True)


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small random numbers; the float32 of all of them would not fit beside the result."""
    weight = torch.empty(shape, dtype=dtype)
    for expert in weight:
        expert.copy_(torch.randn(shape[1:]) / shape[2] ** 0.5)
    return weight


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--experts", type=int, default=128, help="in bf16; float32 takes half (default: 128)")
    add("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help=f"default: {TOKENS}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
