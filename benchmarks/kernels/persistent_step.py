"""Measure the persistent kernel, which runs the decode step of up to eight rows: time and error.

    python -m benchmarks.kernels.persistent_step --model qwen3-0.6b --contexts 37 400 2000 8000
        [--rows 1 2 4 8] [--verify] [--bits 8] [--cache-bits 8] [--layers 12]

Each row is a sequence of its own; with --verify, the rows are the last tokens of one sequence.

Weights and cache are random. The time is the median of three measurements, each of ten replays of a
graph with ten steps. The error is that of the logits relative to float32 on the same device; next
to it is the error of plain torch in bfloat16. Both are medians over several tokens, because a
routing decision that is nearly a tie may go either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.kernels.timing import GpuTimer, floor
from benchmarks.models import model_path
from nanovllm.cli.exit_code import exit_code
from nanovllm.devices.cuda.persistent.sizes import ExpertsShape, StepShape
from nanovllm.models.registry import read_config
from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

STEPS = 10


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    config = read_config(json.loads(Path(model_path(args.model)).read_text()))
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    mlp, experts = config.intermediate_size, ExpertsShape()
    if config.experts is not None:
        top_k, size = config.experts.top_k, config.experts.size
        mlp = top_k * size
        chosen = config.experts.num_experts, top_k, size, config.experts.is_normalized
        experts = ExpertsShape(*chosen)
    sizes = config.hidden_size, *heads, mlp, config.vocab_size
    shape = StepShape(*sizes, args.bits, experts, args.cache_bits)
    has_norm = config.architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    layers = args.layers or len(config.layers)
    variant = Variant(layers, has_norm, config.qkv_bias, block_size=256)
    step = RandomStep(shape, variant, max(args.contexts) + 9, max(args.rows))

    given = step.given
    weights = given.qkv, given.o, given.gate_up, given.down, given.head
    num_bytes = sum(weight.nbytes for weight in weights)
    if experts.num_experts:  # a step reads only the chosen experts
        share = experts.top_k / experts.num_experts
        num_bytes -= round((1 - share) * (given.gate_up.nbytes + given.down.nbytes))
    key_bytes = layers * config.num_kv_heads * config.head_dim * args.cache_bits // 4
    print(f"{args.model}, {layers} layers, {args.bits} bits, {args.cache_bits} in the KV cache")
    print("| rows | context | ms a step | floor | error | bfloat16's |\n|---|---|---|---|---|---|")
    for rows in args.rows:
        for context in args.contexts:
            slots = [1] * rows if args.verify else list(range(1, rows + 1))
            errors = []
            for more in range(args.tokens):
                lengths = dict.fromkeys(slots, context + more)
                errors.append(step.errors(slots, lengths, args.verify)[:2])
            kernel, plain = map(statistics.median, zip(*errors or [(0, 0)], strict=True))
            step.run_rows(slots, dict.fromkeys(slots, context), args.verify)
            ms = statistics.median(timer.microseconds([step.run] * STEPS) for _ in range(3)) / 1000
            keys = context * (1 if args.verify else rows) * key_bytes
            best = floor(num_bytes + keys, 0) / 1000
            row = f"{rows} | {context:,} | {ms:.4f} | {best:.3f} | {kernel:.4f} | {plain:.4f}"
            print(f"| {row} |", flush=True)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[37, 400, 2000, 8000, 32000])
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="per weight")
    parser.add_argument("--cache-bits", type=int, choices=(16, 8), default=16, help="per value")
    parser.add_argument("--layers", type=int, help="(default: as in the model)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--verify", action="store_true", help="rows are positions of one sequence")
    parser.add_argument("--tokens", type=int, default=9, help="tokens whose error is measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
