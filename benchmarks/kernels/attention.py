"""Sweep the paged attention kernels on a GPU: microseconds a layer, and TB/s or TFLOP/s.

    python -m benchmarks.kernels.attention [--quick]

Layers take turns, each with a cache of its own, so that L2 holds nothing from the last one; all of
them are one CUDA graph. The first configuration of each list is the one the engine would choose.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.kernels.cuda.attention_decode import (
    DecodeConfig,
    choose_splits,
    decode_config,
    paged_decode,
    partial_size,
)
from nanovllm.kernels.cuda.attention_prefill import PrefillConfig, paged_prefill, prefill_config
from nanovllm.kernels.cuda.attention_tma import CONFIG, tma_prefill

BLOCK_SIZE = EngineConfig("").kvcache_block_size
NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
SCALE = HEAD_DIM**-0.5
NUM_REPLAYS = 20
MAX_SECONDS = 90.0  # no configuration is begun after that
MIN_BYTES, MAX_LAYERS = 400_000_000, 128  # several times L2, as far as that many layers go

DECODES = [(rows, context) for rows in (1, 64, 256) for context in (256, 900, 2000, 4000)]
PREFILLS = [(8, 2048), (2, 8192), (64, 2048)]
DECODE_CONFIGS = [
    DecodeConfig(tile=32, num_warps=2, num_stages=2),
    DecodeConfig(tile=32, num_warps=2, num_stages=4),
    DecodeConfig(tile=32, num_warps=4, num_stages=3),
    DecodeConfig(tile=64, num_warps=4, num_stages=3),
]
PREFILL_CONFIGS = [
    PrefillConfig(lines=128, tile=32, num_warps=4, num_stages=4),
    PrefillConfig(lines=128, tile=64, num_warps=4, num_stages=2),
    PrefillConfig(lines=128, tile=64, num_warps=8, num_stages=3),
    PrefillConfig(lines=128, tile=128, num_warps=8, num_stages=3),
    PrefillConfig(lines=64, tile=64, num_warps=4, num_stages=3),
]
OTHER_PAIRS = (8, 32, 64)  # tried with the tiles that the engine would choose


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    seconds: float  # a layer


@dataclass(frozen=True, slots=True)
class Layers:
    """Several layers' caches, and the blocks and queries that all of them share."""

    caches: Tensor  # [layers, 2, num_blocks, block_size, kv_heads, head_dim]
    block_table: Tensor
    slots: Tensor
    context_lens: Tensor
    q: Tensor
    out: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only what the engine would choose")
    is_quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("benchmarks.kernels.attention needs a CUDA device, and there is none here")
        return
    deadline = time.monotonic() + MAX_SECONDS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}", flush=True)
    for num_rows, context in PREFILLS:
        sweep_prefill(num_rows, context, 16, deadline, is_quick)
    for num_rows, context in DECODES:
        sweep_decode(num_rows, context, 16, deadline, is_quick)
    for num_rows, context in DECODES[::3] if is_quick else DECODES:
        sweep_decode(num_rows, context, 32, deadline, is_quick=True)


def sweep_decode(
    num_rows: int, context: int, num_heads: int, deadline: float, is_quick: bool
) -> None:
    layers = make_layers(num_rows, context, num_rows, num_heads)
    num_bytes = num_rows * context * layers.caches[0, :, 0, 0].nbytes
    runs = decode_runs(layers, context, is_quick)
    title = f"decode {num_rows} x {context}, {num_heads}/{NUM_KV_HEADS} heads"
    report(title, sweep(runs, layers, deadline), num_bytes / 1e12, "TB/s")


def sweep_prefill(
    num_rows: int, context: int, num_heads: int, deadline: float, is_quick: bool
) -> None:
    layers = make_layers(num_rows, context, num_rows * context, num_heads)
    num_scores = num_rows * context * (context + 1) / 2
    runs = prefill_runs(layers, context, is_quick)
    title = f"prefill {num_rows} x {context}, {num_heads}/{NUM_KV_HEADS} heads"
    flops = 4 * HEAD_DIM * num_heads * num_scores
    report(title, sweep(runs, layers, deadline), flops / 1e12, "TFLOP/s")


def make_layers(num_rows: int, context: int, num_tokens: int, num_heads: int) -> Layers:
    max_blocks = -(-context // BLOCK_SIZE)
    num_blocks = num_rows * max_blocks
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    num_layers = -(-MIN_BYTES // (num_rows * context * token_bytes))
    num_layers = max(2, min(num_layers, MAX_LAYERS))
    shape = (num_layers, 2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    table = torch.randperm(num_blocks, device="cuda").int().view(num_rows, max_blocks)
    q = torch.randn(num_tokens, num_heads, HEAD_DIM, device="cuda", dtype=DTYPE)
    return Layers(
        torch.randn(shape, device="cuda", dtype=DTYPE),
        table,
        torch.randperm(num_rows, device="cuda").int(),
        torch.full((num_rows,), context, device="cuda", dtype=torch.int32),
        q,
        torch.empty_like(q),
    )


Run = tuple[str, Callable[[Tensor], None]]  # a name, and what runs one layer's cache


def decode_runs(layers: Layers, context: int, is_quick: bool) -> Iterator[Run]:
    num_rows, num_heads = layers.q.shape[:2]
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    chosen = choose_splits(num_rows, NUM_KV_HEADS, 4096, num_sms)
    other = 16 if chosen == 32 else 2 * chosen
    configs = [decode_config(HEAD_DIM, DTYPE)] + ([] if is_quick else DECODE_CONFIGS)
    for num_splits in (chosen,) if is_quick else (chosen, other):
        size = partial_size(num_rows, num_heads, HEAD_DIM, num_splits)
        partial = torch.empty(size, device="cuda")
        for config in configs:
            name = f"tile {config.tile} warps {config.num_warps} stages {config.num_stages}"
            yield f"{name} splits {num_splits}", decode_run(layers, num_splits, partial, config)


def decode_run(
    layers: Layers, num_splits: int, partial: Tensor, config: DecodeConfig
) -> Callable[[Tensor], None]:
    columns = layers.block_table, layers.slots, layers.context_lens, None, layers.out
    split = num_splits, partial
    return lambda cache: paged_decode(
        layers.q, cache[0], cache[1], *columns, SCALE, None, *split, config=config
    )


def prefill_runs(layers: Layers, context: int, is_quick: bool) -> Iterator[Run]:
    num_rows = len(layers.slots)
    starts = torch.arange(num_rows, device="cuda", dtype=torch.int32) * context
    lens = layers.context_lens
    group = layers.q.shape[1] // NUM_KV_HEADS
    chosen = prefill_config(HEAD_DIM, DTYPE, context * group)
    others = [replace(chosen, pairs=pairs) for pairs in OTHER_PAIRS]
    runs = [(tma_prefill, CONFIG)] if torch.cuda.get_device_capability() == (9, 0) else []
    runs += [
        (paged_prefill, config)
        for config in [chosen] + ([] if is_quick else PREFILL_CONFIGS + others)
    ]
    for attend, config in runs:
        name = f"{attend.__name__} {config.lines} x {config.tile} warps {config.num_warps}"
        name = f"{name} stages {config.num_stages} pairs {config.pairs}"
        yield name, prefill_run(attend, layers, (starts, lens, lens), context, config)


def prefill_run(
    attend: Callable[..., None],
    layers: Layers,
    columns: tuple[Tensor, Tensor, Tensor],
    context: int,
    config: PrefillConfig,
) -> Callable[[Tensor], None]:
    rows = layers.block_table, layers.slots, *columns
    return lambda cache: attend(
        layers.q, cache[0], cache[1], *rows, context, layers.out, SCALE, None, config=config
    )


def sweep(runs: Iterator[Run], layers: Layers, deadline: float) -> list[Measured]:
    return [
        Measured(name, time_layer(run, layers.caches))
        for name, run in runs
        if time.monotonic() < deadline
    ]


def time_layer(run: Callable[[Tensor], None], caches: Tensor) -> float:
    """Return the median seconds a layer takes when a graph of all layers is replayed."""
    run(caches[0])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            run(cache)
    graph.replay()
    times = [time_replay(graph) for _ in range(NUM_REPLAYS)]
    return statistics.median(times) / len(caches)


def time_replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def report(title: str, measured: list[Measured], work: float, unit: str) -> None:
    print(title if measured else f"{title}: no time left")
    best = min((one.seconds for one in measured), default=0.0)
    for one in measured:
        speed = f"{one.seconds * 1e6:8.1f} us {work / one.seconds:7.2f} {unit}"
        print(f"  {speed}  {one.name}{'  best' if one.seconds == best else ''}", flush=True)


if __name__ == "__main__":
    main()
