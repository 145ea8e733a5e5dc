"""Paged attention on a GPU: microseconds a layer, beside the floor.

    python -m benchmarks.kernels.attention [--sweep]

Layers take turns, each with a cache of its own, so that L2 holds nothing from the last one. "ours"
is what the engine runs; --sweep adds the best three other configurations: of decode 32w2s4p16
(keys of a tile, warps, stages, splits), of prefill 128x64w8s3 (lines x keys of a tile).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import GpuTimer, Run, floor, line
from nanovllm.cli.exit_code import exit_code
from nanovllm.config import EngineConfig
from nanovllm.kernels.cuda.attention_decode import (
    DecodeConfig,
    choose_splits,
    paged_decode,
    partial_size,
)
from nanovllm.kernels.cuda.attention_prefill import PrefillConfig, paged_prefill
from nanovllm.kernels.cuda.attention_tma import suits_tma, tma_prefill

BLOCK_SIZE = EngineConfig("").kvcache_block_size
NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
SCALE = HEAD_DIM**-0.5
MIN_BYTES, MAX_LAYERS = 400_000_000, 128  # several times L2, as far as that many layers go
PREFILLS = [(8, 2048), (2, 8192), (64, 2048)]  # rows, context
DECODES = [(rows, context) for rows in (1, 64, 256) for context in (256, 900, 2000, 4000)]
DECODE_CONFIGS = [(32, 2, 2), (32, 2, 4), (32, 4, 3), (64, 4, 3)]
PREFILL_CONFIGS = [(128, 32, 4, 4), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 3)]

Attend = Callable[[Tensor], Tensor]  # over one layer's cache


@dataclass(frozen=True, slots=True)
class Rows:
    """The blocks and queries that all layers share."""

    block_table: Tensor
    slots: Tensor
    lens: Tensor
    q: Tensor
    out: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other configurations too")
    sweep = parser.parse_args().sweep
    timer = GpuTimer()
    for num_heads in (16, 32):
        for num_rows, context in PREFILLS:
            rows = make_rows(num_rows, context, num_rows * context, num_heads)
            variants = prefills(rows, context, sweep)
            num_scores = num_rows * context * (context + 1) / 2
            measure(
                timer, "prefill", rows, context, variants, 4 * HEAD_DIM * num_heads * num_scores
            )
        for num_rows, context in DECODES:
            rows = make_rows(num_rows, context, num_rows, num_heads)
            measure(timer, "decode", rows, context, decodes(rows, sweep), 0)
    return 0


def make_rows(num_rows: int, context: int, num_tokens: int, num_heads: int) -> Rows:
    max_blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(num_rows * max_blocks, device="cuda").int()
    q = torch.randn(num_tokens, num_heads, HEAD_DIM, device="cuda", dtype=DTYPE)
    lens = torch.full((num_rows,), context, device="cuda", dtype=torch.int32)
    slots = torch.randperm(num_rows, device="cuda").int()
    return Rows(table.view(num_rows, max_blocks), slots, lens, q, torch.empty_like(q))


def decodes(rows: Rows, sweep: bool) -> dict[str, Attend]:
    num_rows, num_heads = rows.q.shape[:2]
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    chosen = choose_splits(num_rows, NUM_KV_HEADS, 4096, num_sms)

    def run(num_splits: int, config: DecodeConfig | None, cache: Tensor) -> Tensor:
        size = partial_size(num_rows, num_heads, HEAD_DIM, num_splits)
        columns = rows.block_table, rows.slots, rows.lens, None, rows.out
        options = SCALE, None, num_splits, torch.empty(size, device="cuda")
        paged_decode(rows.q, cache[0], cache[1], *columns, *options, config=config)
        return rows.out

    found: dict[str, Attend] = {"ours": partial(run, chosen, None)}
    for num_splits in (chosen, 16 if chosen == 32 else 2 * chosen) if sweep else ():
        for tile, num_warps, num_stages in DECODE_CONFIGS:
            name = f"{tile}w{num_warps}s{num_stages}p{num_splits}"
            found[name] = partial(run, num_splits, DecodeConfig(tile, num_warps, num_stages))
    return found


def prefills(rows: Rows, context: int, sweep: bool) -> dict[str, Attend]:
    starts = torch.arange(len(rows.slots), device="cuda", dtype=torch.int32) * context
    columns = rows.block_table, rows.slots, starts, rows.lens, rows.lens

    def run(attend: Callable[..., None], config: PrefillConfig | None, cache: Tensor) -> Tensor:
        place = context, rows.out, SCALE, None
        attend(rows.q, cache[0], cache[1], *columns, *place, config=config)
        return rows.out

    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    cache = torch.empty(0, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE)
    has_tma = is_hopper and suits_tma(rows.q, cache, context, None)
    found: dict[str, Attend] = {
        "ours": partial(run, tma_prefill if has_tma else paged_prefill, None)
    }
    if sweep:
        found["paged"] = partial(run, paged_prefill, None)
        for config in PREFILL_CONFIGS:
            lines, tile, num_warps, num_stages = config
            name = f"{lines}x{tile}w{num_warps}s{num_stages}"
            found[name] = partial(run, paged_prefill, PrefillConfig(*config))
    return found


def measure(
    timer: GpuTimer,
    name: str,
    rows: Rows,
    context: int,
    variants: dict[str, Attend],
    num_flops: float,
) -> None:
    num_rows, num_heads = len(rows.slots), rows.q.shape[1]
    num_bytes = num_rows * context * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    num_layers = max(2, min(-(-MIN_BYTES // num_bytes), MAX_LAYERS))
    shape = (num_layers, 2, rows.block_table.numel(), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = torch.randn(shape, device="cuda", dtype=DTYPE)
    expected = variants["ours"](caches[0]).clone()
    calls: dict[str, list[Run]] = {
        variant: [partial(run, cache) for cache in caches] for variant, run in variants.items()
    }
    times = timer.measure(calls, expected)
    label = f"{name} {num_rows:>3} x {context:>4}, {num_heads}/{NUM_KV_HEADS} heads"
    print(line(label, times, ("ours",), floor(num_bytes, num_flops)), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
