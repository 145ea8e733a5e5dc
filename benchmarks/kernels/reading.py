"""Time decode steps whose kernels only read memory, on a GPU.

    python -m benchmarks.kernels.reading [--models qwen3-0.6b ...] [--rows 64 ...] [--context N]

A kernel of a few microseconds does not reach the device's bandwidth: memory idles until the first
bytes arrive and while its last CTAs finish. A sequence of kernels therefore has a higher floor than
its bytes alone. Prints, in microseconds, the time to read what each kernel of a layer reads, that
of the engine's attention for comparison, and that of a whole step of reads, in which weights are
read after the previous kernel ends or while it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels.linear import DTYPE, shapes_of
from benchmarks.kernels.timing import GpuTimer, Run, floor
from benchmarks.models import model_names, model_path
from nanovllm.attention.backend import AttentionSpec, DecodeRows
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import at_least
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.cuda.device import CudaDevice
from nanovllm.devices.cuda.kernels.pdl import launch_options, wait_for_inputs
from nanovllm.devices.cuda.triton_attention import TritonAttention
from nanovllm.models.config_json import read_model_config
from nanovllm.ops.interface import LayerCache

MODELS, ROWS, CONTEXT = ["qwen3-0.6b"], [64, 128, 256], 256
BLOCK_SIZE = 64
WEIGHTS = frozenset({"qkv", "o", "gate_up", "down", "head"})  # never written by a kernel
# The fastest of nine shapes on an H200: a CTA issues all loads of its 32 KB at once, then exits.
WORDS, NUM_LOADS = 2048, 4
PROGRAM_WORDS = WORDS * NUM_LOADS


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    for model in args.models:
        config = read_model_config(json.loads(Path(model_path(model)).read_text()))
        for num_rows in args.rows:
            print(f"{model}, {num_rows} rows, contexts of {args.context} tokens")
            for name, took in times_of(timer, config, num_rows, args.context).items():
                print(f"  {name:<28}{took:9.1f}", flush=True)
    return 0


def times_of(timer: GpuTimer, config: ModelConfig, num_rows: int, context: int) -> dict[str, float]:
    """Return microseconds, keyed by what was timed."""
    layer, head = layer_bytes(config, num_rows, context), shapes_of(config)["head"].num_bytes
    size = len(config.layers) * sum(layer.values()) + head
    memory = torch.zeros(size // 4 + PROGRAM_WORDS, device="cuda", dtype=torch.int32)
    sizes = [*list(layer.items()) * len(config.layers), ("head", head)]
    reads = chain(memory, sizes, num_rows, frozenset())
    ahead = chain(memory, sizes, num_rows, WEIGHTS)
    times = {}
    for place, name in enumerate(layer):
        times[f"{name}, {layer[name] / 1e6:.1f} MB"] = timer.microseconds(
            reads[place : -1 : len(layer)]
        )
    times["attention of the engine"] = timer.microseconds(attention(config, num_rows, context))
    times["a step of reads"] = timer.microseconds([partial(run_all, reads)])
    times["and weights read ahead"] = timer.microseconds([partial(run_all, ahead)])
    times["all of its bytes at once"] = floor(size, 0)
    return times


def layer_bytes(config: ModelConfig, num_rows: int, context: int) -> Mapping[str, int]:
    """Return the bytes that each kernel reads: its weights, its keys and values, or its rows."""
    shapes = shapes_of(config)
    kv_size = 2 * config.num_kv_heads * config.head_dim
    norm = num_rows * config.hidden_size * DTYPE.itemsize
    return {
        "norm": norm,
        "qkv": shapes["qkv"].num_bytes,
        "rope and store": num_rows * shapes["qkv"].num_out * DTYPE.itemsize,
        "attention": num_rows * context * kv_size * DTYPE.itemsize,
        "o": shapes["o"].num_bytes,
        "norm of the mlp": norm,
        "gate_up": shapes["gate_up"].num_bytes,
        "down": shapes["down"].num_bytes,
    }


def chain(
    memory: Tensor, sizes: list[tuple[str, int]], num_rows: int, ahead: frozenset[str]
) -> list[Run]:
    """Return reads of consecutive memory; those in `ahead` begin before the previous one ends."""
    reads: list[Run] = []
    found, begin = torch.zeros(1, device=memory.device, dtype=torch.int32), 0
    for name, size in sizes:
        end = begin + size // 4
        reads.append(partial(read, memory[begin:end], found, num_rows, name in ahead))
        begin = end
    return reads


def run_all(runs: list[Run]) -> Tensor:
    for run in runs:
        y = run()
    return y


def read(memory: Tensor, found: Tensor, num_rows: int, is_ahead: bool) -> Tensor:
    grid = (triton.cdiv(len(memory), PROGRAM_WORDS),)
    options = launch_options(memory, num_rows) | {"IS_AHEAD": is_ahead, "num_warps": 4}
    _read[grid](memory, found, len(memory), WORDS=WORDS, NUM_LOADS=NUM_LOADS, **options)
    return found


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    memory,
    found,
    size,
    WORDS: tl.constexpr,
    NUM_LOADS: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if not IS_AHEAD:
        wait_for_inputs(OVERLAP)
    at = tl.program_id(0) * (WORDS * NUM_LOADS) + tl.arange(0, WORDS)
    total = tl.zeros((WORDS,), tl.int32)
    for i in tl.static_range(NUM_LOADS):
        total += tl.load(memory + at + i * WORDS, mask=at + i * WORDS < size, other=0)
    if IS_AHEAD:
        wait_for_inputs(OVERLAP)
    if tl.sum(total) == 1:  # never true, but the compiler does not know that `memory` is all zeros
        tl.store(found, 1)


def attention(config: ModelConfig, num_rows: int, context: int) -> list[Run]:
    """Return the engine's attention calls of all layers, over blocks in random order."""
    device = torch.device("cuda")
    width = -(-context // BLOCK_SIZE)
    blocks = torch.randperm(num_rows * width, device=device).int().view(num_rows, width)
    rows = torch.arange(num_rows, device=device, dtype=torch.int32)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    backend = TritonAttention(CudaDevice(EngineConfig("none")), num_sms, is_hopper=True)
    lengths = torch.full_like(rows, context)
    plan = backend.decode_plan(DecodeRows(blocks, rows, lengths, order=rows))
    spec = AttentionSpec(config.attention_scale)
    heads, dim = config.num_kv_heads, config.head_dim
    q = torch.randn(num_rows, config.num_heads, dim, device=device, dtype=DTYPE)
    shape = len(config.layers), 2, num_rows * width, BLOCK_SIZE, heads, dim
    caches = torch.zeros(shape, device=device, dtype=DTYPE)
    return [partial(backend.attend, q, LayerCache(k, v), plan, spec) for k, v in caches]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = model_names()
    text = f"one or more of {', '.join(models)} (default: {' '.join(MODELS)})"
    add("--models", nargs="+", choices=models, default=MODELS, metavar="NAME", help=text)
    text = "sequences in a step (default: 64 128 256)"
    add("--rows", nargs="+", type=at_least(1), default=ROWS, metavar="N", help=text)
    text = "tokens per sequence (default: 256)"
    add("--context", type=at_least(1), default=CONTEXT, metavar="N", help=text)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
