"""Measure a layer's work after attention as one kernel: o, the norm, gate and up, and down.

    python -m benchmarks.kernels.fused_mlp [--model qwen3-0.6b] [--rows 16 64 128 256]

This is a prototype for 16 to 256 rows; the engine does not use it. Its CTAs wait for each other
between the products, and prefetch the next weight into L2 before they wait. Times are microseconds
per layer, next to those of the engine's kernels for the same work. Both include the norm that adds
up the partial sums of `down`, and rotate through layers to defeat the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels.linear import shapes_of
from benchmarks.kernels.timing import GpuTimer, floor
from benchmarks.models import model_path
from nanovllm.cli.exit_code import exit_code
from nanovllm.devices.cuda.kernels.elementwise import rms_norm
from nanovllm.devices.cuda.kernels.linear_tiles import multiply_tile, store_tile, tile_rows
from nanovllm.devices.cuda.kernels.pdl import launch_options, prefetch, wait_for_inputs
from nanovllm.devices.cuda.ops import TritonOps
from nanovllm.models.config_json import read_model_config
from nanovllm.ops.interface import NormWeights, ResidualStream

NUM_LAYERS = 28
NUM_CTAS = 128
BLOCK_OUT, BLOCK_IN = 64, 64  # weight rows and inputs of a tile
EPS = 1e-6
NUM_BARRIERS = 3


@dataclass(frozen=True, slots=True)
class Layer:
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class Config:
    block_rows: int  # rows of x in a tile
    num_splits: int  # split-K factor of o and down
    num_warps: int
    num_stages: int
    prefetches: bool

    @property
    def name(self) -> str:
        name = f"{self.block_rows} rows, {self.num_splits} splits, {self.num_warps} warps"
        return name + ", prefetch" * self.prefetches


def configs(rows: int) -> list[Config]:
    block_rows = sorted({min(max(rows, 16), 64), min(max(rows, 16), 128)})
    options = itertools.product(block_rows, (4, 8), (4, 8), (True, False))
    return [
        Config(block, splits, warps, 4 if block > 64 else 6, prefetches)
        for block, splits, warps, prefetches in options
    ]


def main() -> int:
    args = parse_args()
    timer = GpuTimer()
    config = read_model_config(json.loads(Path(model_path(args.model)).read_text()))
    shapes = shapes_of(config)
    layers = [make_layer(shapes) for _ in range(NUM_LAYERS)]
    used = "o", "gate_up", "down"
    num_bytes = sum(shapes[name].num_bytes for name in used)
    for rows in args.rows:
        x = torch.randn(rows, shapes["o"].num_in, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn(rows, shapes["o"].num_out, device="cuda", dtype=torch.bfloat16)
        ways = {"engine": partial(run_engine, TritonOps())}
        for config in configs(rows):
            ways[config.name] = Fused(config, rows, layers[0])
        expected = ways["engine"](x, residual.clone(), layers[0])
        best = floor(num_bytes, num_bytes * rows)
        for name, run in ways.items():
            found = run(x, residual.clone(), layers[0])
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            calls = [partial(run, x, residual.clone(), layer) for layer in layers]
            us = statistics.median(timer.microseconds(calls) for _ in range(3))
            text = f"{rows:>4} rows  {name:40} {us:7.2f} us  floor {best:.1f}  error {error:.1e}"
            print(text, flush=True)
    return 0


def make_layer(shapes: dict) -> Layer:
    weights = []
    for name in ("o", "gate_up", "down"):
        shape = shapes[name]
        weight = torch.empty(shape.num_out, shape.num_in, device="cuda", dtype=torch.bfloat16)
        weights.append(weight.normal_(std=shape.num_in**-0.5))
    ones = torch.ones(shapes["o"].num_out, device="cuda", dtype=torch.bfloat16)
    return Layer(*weights, NormWeights(ones, EPS))


def run_engine(ops: TritonOps, x: Tensor, residual: Tensor, layer: Layer) -> Tensor:
    o, down = (ops.pack_linear(w, None, None, allow_copy=False) for w in (layer.o, layer.down))
    gate_up = ops.pack_linear(layer.gate_up, None, "silu", allow_copy=False)
    gated, residual = gate_up.after_norm(o.add_to(residual, x), layer.norm)
    return rms_norm(down.add_to(residual, gated), layer.norm)


class Fused:
    """Does the same work with one kernel, in its own buffers."""

    def __init__(self, config: Config, rows: int, layer: Layer) -> None:
        self.config = config
        hidden, mlp = layer.o.shape[0], layer.down.shape[1]

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        self.parts = empty(config.num_splits, rows, hidden, dtype=torch.float32)
        self.update = empty(config.num_splits, rows, hidden, dtype=torch.float32)
        self.normed, self.gated = empty(rows, hidden), empty(rows, mlp)
        self.counters = torch.zeros(NUM_BARRIERS, 32, device="cuda", dtype=torch.int32)

    def __call__(self, x: Tensor, residual: Tensor, layer: Layer) -> Tensor:
        config, (hidden, q) = self.config, layer.o.shape
        _after_attention[(NUM_CTAS,)](
            *(x, residual, layer.norm.weight, layer.norm.eps, layer.o, layer.gate_up, layer.down),
            *(self.parts, self.normed, self.gated, self.update, self.counters, len(x)),
            HIDDEN=hidden,
            Q=q,
            MLP=layer.down.shape[1],
            SPLITS=config.num_splits,
            BLOCK_ROWS=config.block_rows,
            BLOCK_OUT=BLOCK_OUT,
            BLOCK_IN=BLOCK_IN,
            PREFETCHES=config.prefetches,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch_options(x, len(x)),
        )
        return rms_norm(ResidualStream(residual, self.update), layer.norm)


@triton.jit(do_not_specialize=("num_rows",))
def _after_attention(  # type: ignore[no-untyped-def]
    x,
    residual,
    norm,
    eps,
    o,
    gate_up,
    down,
    parts,
    normed,
    gated,
    update,
    counters,
    num_rows,
    HIDDEN: tl.constexpr,
    Q: tl.constexpr,
    MLP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PREFETCHES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if PREFETCHES:
        _prefetch_tile(o, tl.program_id(0), HIDDEN, Q, SPLITS, BLOCK_OUT, False)
    wait_for_inputs(OVERLAP)
    if tl.program_id(0) == 0:  # every CTA left this barrier before the previous launch ended
        tl.store(counters + 64, 0)
    _multiply_split(parts, x, o, num_rows, HIDDEN, Q, SPLITS, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN)
    _arrive(counters)
    if PREFETCHES:
        _prefetch_tile(gate_up, tl.program_id(0), MLP, HIDDEN, 1, BLOCK_OUT // 2, True)
    _wait(counters)
    i = tl.arange(0, triton.next_power_of_2(HIDDEN))
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        value = tl.load(residual + row * HIDDEN + i, mask=i < HIDDEN, other=0.0).to(tl.float32)
        for split in tl.static_range(SPLITS):
            part = parts + (split * num_rows + row) * HIDDEN + i
            value += tl.load(part, mask=i < HIDDEN, other=0.0, cache_modifier=".cg")
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + row * HIDDEN + i, total, mask=i < HIDDEN)
        value = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / HIDDEN + eps)
        weight = tl.load(norm + i, mask=i < HIDDEN, other=0.0)
        result = (value * scale).to(total.dtype) * weight
        tl.store(normed + row * HIDDEN + i, result, mask=i < HIDDEN)
    _arrive(counters + 32)
    if PREFETCHES:
        _prefetch_tile(down, tl.program_id(0), HIDDEN, MLP, SPLITS, BLOCK_OUT, False)
    _wait(counters + 32)
    if tl.program_id(0) == 0:
        tl.store(counters, 0)
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    num_tiles: tl.constexpr = (MLP + BLOCK_OUT // 2 - 1) // (BLOCK_OUT // 2)
    for index in tl.range(tl.program_id(0), num_tiles * num_row_tiles, tl.num_programs(0)):
        rows = index // num_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = rows < num_rows
        w_rows, is_out = tile_rows(index % num_tiles, MLP, BLOCK_OUT // 2, True)
        sums = multiply_tile(
            *(gate_up, None, w_rows, is_out, normed + rows[None, :] * HIDDEN, is_row, 0, HIDDEN),
            *(HIDDEN, HIDDEN, 0, -1, HIDDEN, BLOCK_IN, True),
        )
        store_tile(gated, sums, index % num_tiles, rows, is_row, MLP, BLOCK_OUT // 2, "silu")
    _arrive(counters + 64)
    _wait(counters + 64)
    if tl.program_id(0) == 0:
        tl.store(counters + 32, 0)
    _multiply_split(
        update, gated, down, num_rows, HIDDEN, MLP, SPLITS, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN
    )


@triton.jit
def _multiply_split(  # type: ignore[no-untyped-def]
    y,
    x,
    weight,
    num_rows,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Store partial sums [splits, rows, outputs]; a CTA begins with the tile it prefetched."""
    COUNT: tl.constexpr = NUM_IN // SPLITS
    TILES: tl.constexpr = NUM_OUT // BLOCK_OUT
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    num_items = TILES * SPLITS * num_row_tiles
    for index in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, split = index % TILES, index // TILES % SPLITS
        rows = index // (TILES * SPLITS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = rows < num_rows
        w_rows, is_out = tile_rows(tile, NUM_OUT, BLOCK_OUT, False)
        first = split * COUNT
        sums = multiply_tile(
            *(weight, None, w_rows, is_out, x + rows[None, :] * NUM_IN, is_row, first, NUM_IN),
            *(NUM_IN, NUM_IN, 0, -1, COUNT, BLOCK_IN, True),
        )
        store_tile(y, sums, tile, split * num_rows + rows, is_row, NUM_OUT, BLOCK_OUT, None)


@triton.jit
def _prefetch_tile(  # type: ignore[no-untyped-def]
    weight,
    index,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Prefetch the first tile of this CTA into L2."""
    TILES: tl.constexpr = (NUM_OUT + BLOCK_OUT - 1) // BLOCK_OUT
    COUNT: tl.constexpr = NUM_IN // SPLITS
    if index < TILES * SPLITS:
        w_rows, _ = tile_rows(index % TILES, NUM_OUT, BLOCK_OUT, IS_GATED)
        for i in tl.range(0, COUNT, 64):  # 64 bfloat16 are a cache line
            prefetch(weight + w_rows.to(tl.int64) * NUM_IN + index // TILES * COUNT + i)


@triton.jit
def _arrive(counter):  # type: ignore[no-untyped-def]
    tl.debug_barrier()  # orders all threads' stores before the increment
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait(counter):  # type: ignore[no-untyped-def]
    """Wait until all CTAs have arrived."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 v; AGAIN: ld.acquire.gpu.global.u32 v, [$1]; "
        "setp.lt.u32 p, v, $2; @p bra AGAIN; mov.u32 $0, v; }",
        "=r,l,r",
        [counter.to(tl.int64), tl.num_programs(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_code(main))
