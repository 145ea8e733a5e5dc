"""Compare matrix products on the CPU in turns: torch, oneDNN with packed weights, and ours.

    python -m benchmarks.kernels.cpu_products linear    # SmolLM2's projections, few rows
    python -m benchmarks.kernels.cpu_products experts   # a layer of Qwen3-30B-A3B's experts
    python -m benchmarks.kernels.cpu_products blocks    # GGUF weights and bfloat16

Weights are random. Projections of all layers run in turn, so that weights come from memory as they
do in a decode step. All experts run in bfloat16, and half as many in float32. They are compared
with a loop over experts, as models are often written, and with "sum": the time torch takes to add
up the weights of the chosen experts, each of which must be read once. For GGUF weights, there is
one large projection of each quantization type. Reports medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import take_turns
from nanovllm.cli.options import at_least
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.gguf_weights import to_panels
from nanovllm.devices.cpu.kernels.block_types import TYPES
from nanovllm.devices.cpu.ops import NumbaOps, pack_onednn
from nanovllm.devices.cpu.program import Launcher
from nanovllm.ops.interface import Routing
from nanovllm.ops.quantized_weight import PanelWeight
from nanovllm.ops.torch_experts import route
from nanovllm.ops.torch_linear import linear
from nanovllm.ops.torch_ops import TorchOps

FEATURES = find_cpu_features()
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
HIDDEN, EXPERT_SIZE, ROUTING = 2048, 768, Routing(8, is_normalized=True)
BLOCKS_SHAPE = 32768, 768
NUM_ROUNDS = 5


def main() -> None:
    args = parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {NUM_ROUNDS} rounds")
    with torch.inference_mode():
        if args.products == "blocks":
            return measure_blocks(args.rows or [1, 2, 4, 8, 16, 64, 512])
        for dtype in (torch.bfloat16, torch.float32):
            ops = NumbaOps(Launcher(dtype), FEATURES)
            if args.products == "linear":
                measure_linear(ops, dtype, args.rows or [1, 2, 4, 8, 16, 32, 64])
            else:
                num_experts = args.experts if dtype == torch.bfloat16 else args.experts // 2
                rows = args.rows or [1, 8, 64, 128, 256, 1024]
                measure_experts(ops, dtype, num_experts, rows)


def measure_linear(ops: NumbaOps, dtype: torch.dtype, rows: list[int]) -> None:
    ops.max_linear_rows = max(rows)  # so that our kernel runs all of them
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES]
    matmul_dtype = FEATURES.matmul_dtype(dtype)
    models = {
        "by rows": [partial(linear, weight=w, bias=None, dtype=matmul_dtype) for w in weights],
        "ours": [ops.pack_linear(weight, None, None, allow_copy=False) for weight in weights],
    }
    if dtype in FEATURES.packs:
        models["oneDNN"] = [pack_onednn(weight, None) for weight in weights]
    for num_rows in rows:
        inputs = [torch.randn(num_rows, weight.shape[1]).to(dtype) for weight in weights]
        runs = {name: partial(run_all, linears, inputs) for name, linears in models.items()}
        report(f"{dtype} {num_rows:2d} rows", runs, sum(weight.nbytes for weight in weights))


def measure_blocks(rows: list[int]) -> None:
    """Measure GGUF weights of random bytes, whose values only need to be finite."""
    ops = NumbaOps(Launcher(torch.bfloat16), FEATURES)
    plain = ops.pack_linear(torch.randn(BLOCKS_SHAPE).bfloat16(), None, None, allow_copy=True)
    num_out, num_in = BLOCKS_SHAPE
    for kind, block_type in TYPES.items():
        row_bytes = num_in // block_type.size * block_type.num_bytes
        weight = to_panels(kind, torch.randint(0, 60, (num_out, row_bytes), dtype=torch.uint8))
        stored = ops.pack_linear(PanelWeight((weight,)), None, None, allow_copy=True)
        for num_rows in rows:
            x = torch.randn(num_rows, num_in).bfloat16()
            runs = {"bfloat16": partial(plain, x), "ours": partial(stored, x)}
            report(f"{kind} {num_rows:3d} rows", runs, weight.data.nbytes)


def run_all(linears: list[Callable[[Tensor], Tensor]], inputs: list[Tensor]) -> None:
    for run, x in zip(linears, inputs, strict=True):
        run(x)


def measure_experts(ops: NumbaOps, dtype: torch.dtype, num_experts: int, rows: list[int]) -> None:
    ops.max_expert_rows = max(rows) * ROUTING.top_k  # so that our kernels run all of them
    gate_up = make(num_experts, 2 * EXPERT_SIZE, HIDDEN, dtype=dtype)
    down = make(num_experts, HIDDEN, EXPERT_SIZE, dtype=dtype)
    library = TorchOps(FEATURES.matmul_dtype(dtype))
    candidates = {
        "loop": partial(loop, gate_up, down),
        "oneDNN": library.pack_experts(gate_up, down, ROUTING),
        "ours": ops.pack_experts(gate_up, down, ROUTING),
    }
    for num_tokens in rows:
        x, logits = (torch.randn(num_tokens, n).to(dtype) for n in (HIDDEN, num_experts))
        num_chosen = len(route(logits, ROUTING)[0].unique())
        chosen = gate_up[:num_chosen].view(torch.float32), down[:num_chosen].view(torch.float32)
        runs: dict[str, Callable[[], object]] = {"sum": lambda own=chosen: [w.sum() for w in own]}
        runs |= {name: partial(run, x, logits) for name, run in candidates.items()}
        name = f"{dtype} {num_tokens:4d} tokens, {num_chosen:3d} experts"
        report(name, runs, sum(weight.nbytes for weight in chosen))


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return small random weights, made expert by expert: all in float32 would not fit."""
    weight = torch.empty(shape, dtype=dtype)
    for expert in weight:
        expert.copy_(torch.randn(shape[1:]) / shape[2] ** 0.5)
    return weight


def loop(gate_up: Tensor, down: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    """Compute the experts one by one, each for the tokens in its mask."""
    ids, weights = route(logits, ROUTING)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, len(down)).permute(2, 1, 0)  # [experts, top_k, tokens]
    for expert in range(len(down)):
        choices, tokens = torch.where(mask[expert])
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, y * weights[tokens, choices, None])
    return out


def report(name: str, runs: dict[str, Callable[[], object]], num_bytes: int) -> None:
    medians = {each: statistics.median(t) for each, t in take_turns(runs, NUM_ROUNDS).items()}
    cells = [f"{each} {seconds * 1e3:8.2f}" for each, seconds in medians.items()]
    speed = f"{num_bytes / medians['ours'] / 1e9:5.1f} GB/s"
    print(f"{name}, ms: {'  '.join(cells)}   ours {speed}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("products", choices=["linear", "experts", "blocks"])
    add(
        "--rows", type=at_least(1), nargs="+", metavar="N", help="rows or tokens (default: several)"
    )
    add(
        "--experts",
        type=at_least(16),
        default=128,
        help="number of experts; float32 uses half (default: 128)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
