"""Compare tiles and key splits of decode attention, for one layer in bfloat16.

    python -m benchmarks.kernels.decode_attention [--num-heads 16] [--num-kv-heads 8]

Each line is a number of rows and a range of context lengths; the first column is what the engine
chooses. The floor is the time to read the keys and values once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import GpuTimer, floor, line
from nanovllm.attention.backend import AttentionSpec
from nanovllm.cli.exit_code import exit_code

HEAD_DIM, BLOCK_SIZE = 128, 256
Case = tuple[int, int, int, int]  # rows, shortest and longest context, longest that is allowed
CASES: tuple[Case, ...] = (
    *((rows, 290, 290, 512) for rows in (16, 64, 128, 256)),
    *((rows, 1000, 1000, 4096) for rows in (16, 32, 64, 96, 128, 256)),
    *((rows, 100, 1500, 4096) for rows in (16, 32, 48, 64, 96, 128, 192, 256)),
    *((rows, 3000, 3000, 4096) for rows in (8, 64)),
)
TILES = ((32, 2, 4), (64, 2, 3), (64, 2, 4), (64, 4, 3))  # keys, warps, stages
SPLITS = (1, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """The KV cache of a layer and the rows that read it."""

    k: Tensor
    v: Tensor
    table: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    args = parser.parse_args()
    timer = GpuTimer()
    for num_rows, shortest, longest, most in CASES:
        measure(timer, args.num_heads, args.num_kv_heads, (num_rows, shortest, longest, most))
    return 0


def measure(
    timer: GpuTimer, num_heads: int, num_kv_heads: int, case: tuple[int, int, int, int]
) -> None:
    from nanovllm.devices.cuda.kernels.attention_configs import (
        MIN_DECODE_SPLIT,
        MIN_Q_ROWS,
        AttentionConfig,
        choose_large_tile,
        choose_splits,
        decode_config,
    )
    from nanovllm.devices.cuda.kernels.attention_tiles import PagedCache
    from nanovllm.devices.cuda.kernels.paged_attention import QueryRows, paged_attention

    num_rows, shortest, longest, max_context = case
    spec = AttentionSpec(scale=HEAD_DIM**-0.5, window=None, softcap=None)
    lens = torch.randint(
        shortest, longest + 1, (num_rows,), generator=torch.Generator().manual_seed(1)
    )
    order = torch.argsort(lens, descending=True).to(torch.int32).cuda()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    rows = QueryRows(slots, lens.to(torch.int32).cuda(), order=order)
    # Together, the caches are larger than L2, so that each call reads its keys from memory.
    layers = [make_layer(num_rows, longest, num_kv_heads) for _ in range(2 if num_rows > 32 else 6)]
    q = torch.randn(num_rows, num_heads, HEAD_DIM, device="cuda").bfloat16()

    def run(config: AttentionConfig, num_splits: int, layer: Layer) -> Tensor:
        out = torch.empty_like(q)
        cache = PagedCache(layer.k, layer.v, layer.table)
        paged_attention(q, cache, rows, out, spec, config, num_splits)
        return out

    num_splits = choose_splits(num_rows, num_kv_heads, max_context, 132)
    large_tile = choose_large_tile(num_rows * num_kv_heads, num_splits, max_context)
    variants = {"engine": (decode_config(HEAD_DIM, q.dtype, large_tile), num_splits)}
    for tile in TILES:
        for splits in SPLITS:
            config = AttentionConfig(MIN_Q_ROWS, *tile, min_split=MIN_DECODE_SPLIT)
            variants[f"{'x'.join(map(str, tile))} /{splits}"] = config, splits
    expected = run(*variants["engine"], layers[0]).float()
    times = timer.measure(
        {
            name: [partial(run, *variant, each) for each in layers]
            for name, variant in variants.items()
        },
        expected,
    )
    num_bytes = int(lens.sum()) * num_kv_heads * HEAD_DIM * 2 * q.itemsize
    print(
        line(f"{num_rows:4} rows of {shortest} to {longest}", times, floor(num_bytes, 0)),
        flush=True,
    )


def make_layer(num_rows: int, longest: int, num_kv_heads: int) -> Layer:
    num_blocks = -(-longest // BLOCK_SIZE)
    shape = num_rows * num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(shape[0], device="cuda").to(torch.int32).view(num_rows, num_blocks)
    return Layer(k, v, table)


if __name__ == "__main__":
    sys.exit(exit_code(main))
