"""Ways to compute one projection on CUDA, and how to compile them before they are timed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.runtime.jit import JITFunction

from nanovllm.config import ModelConfig
from nanovllm.kernels.cuda import elementwise
from nanovllm.kernels.cuda import linear_few_rows as few_rows
from nanovllm.kernels.cuda import linear_one_row as one_row
from nanovllm.kernels.cuda.linear_few_rows import FewRowsConfig
from nanovllm.kernels.cuda.ops import TritonOps
from nanovllm.kernels.ops import Activation, Hidden

DTYPE = torch.bfloat16
TILE_ELEMENTS = (1024, 16384)  # of the weight that a program of one row holds: fewest, most
NUM_STAGES = (3, 5, 8)
MAX_RESERVED_BYTES = 2 << 30  # by each process that compiles


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [num_out, num_in]; a gated one holds gate and up."""

    num_out: int
    num_in: int
    is_gated: bool = False
    is_summed: bool = False  # a norm follows, which may be left to finish the sum

    def __str__(self) -> str:
        return f"{self.num_out} x {self.num_in}{' gated' if self.is_gated else ''}"

    @property
    def activation(self) -> Activation | None:
        return "silu" if self.is_gated else None

    @property
    def num_elements(self) -> int:
        return self.num_out * self.num_in


def shapes_of(config: ModelConfig) -> dict[str, Shape]:
    """The projections of a model by name."""
    hidden_size, inner_size = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {
        "qkv": Shape(q_size + 2 * kv_size, hidden_size),
        "o": Shape(hidden_size, q_size, is_summed=True),
        "gate_up": Shape(2 * inner_size, hidden_size, is_gated=True),
        "down": Shape(hidden_size, inner_size, is_summed=True),
        "head": Shape(config.vocab_size, hidden_size),
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to project; it travels to the processes that compile."""

    name: str
    run: Callable[[Tensor, Tensor], Tensor]  # x [rows, in], weight [out, in]


def library(shape: Shape) -> Variant:
    return Variant("cuBLAS", partial(_library, shape))


def chosen(shape: Shape) -> Variant:
    """What the engine runs."""
    return Variant("ours", partial(_chosen, shape))


def candidates(shape: Shape, num_rows: int, device: torch.device) -> Iterator[Variant]:
    """What the engine might run instead."""
    if num_rows == 1:
        return one_row_candidates(shape)
    return few_rows_candidates(shape, num_rows, device)


def one_row_candidates(shape: Shape) -> Iterator[Variant]:
    fewest, most = TILE_ELEMENTS
    for config in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (4, 8)):
        block_out, block_in, num_warps = config
        is_useful = block_in <= triton.next_power_of_2(shape.num_in)
        if is_useful and fewest <= block_out * block_in <= most:
            name = f"{block_out}x{block_in}w{num_warps}"
            yield Variant(name, partial(_one_row, shape, config))


def few_rows_candidates(shape: Shape, num_rows: int, device: torch.device) -> Iterator[Variant]:
    """Blocks that hold all rows or half of them; split-K where a norm may add the partial sums."""
    x = torch.empty(num_rows, 0, device=device, dtype=DTYPE)
    whole = min(max(16, triton.next_power_of_2(num_rows)), 128)
    blocks = sorted({whole, max(16, whole // 2)})
    splits = (1, 2, 4, 8) if shape.is_summed else (1,)
    for num_splits, block, tile in itertools.product(splits, blocks, (64, 128)):
        split_in = shape.num_in // num_splits
        stage_bytes = (few_rows.BLOCK_OUT + block) * tile * DTYPE.itemsize
        most = min(few_rows.shared_bytes(device) // stage_bytes, split_in // tile + 1)
        default = few_rows.few_rows_config(num_rows, split_in, x)
        for num_stages in sorted({min(num_stages, most) for num_stages in NUM_STAGES}):
            config = replace(default, block_rows=block, block_in=tile, num_stages=num_stages)
            name = f"{block}x{tile}s{num_stages}p{num_splits}"
            yield Variant(name, partial(_few_rows, shape, config, num_splits))


def _library(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    y = functional.linear(x, weight)
    return elementwise.gate(y, "silu") if shape.is_gated else y


def _chosen(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    packed = TritonOps().pack_linear(weight, None, shape.activation, has_room=False)
    if not shape.is_summed:
        return packed(x)
    residual = torch.empty(len(x), shape.num_out, device=x.device, dtype=x.dtype)
    hidden = packed.add_to(residual, x)
    return hidden.residual if hidden.update is None else hidden.update


def _one_row(shape: Shape, config: tuple[int, int, int], x: Tensor, weight: Tensor) -> Tensor:
    with patch.object(one_row, "one_row_config", lambda *_: config):
        return one_row.one_row_linear(Hidden(x), None, weight, None, shape.activation)[0]


def _few_rows(
    shape: Shape, config: FewRowsConfig, num_splits: int, x: Tensor, weight: Tensor
) -> Tensor:
    return few_rows.few_rows_linear(x, weight, None, shape.activation, num_splits, config)


def compile_pool() -> ProcessPoolExecutor:
    """Processes for `compile_variant`; two cores are left to the one that measures."""
    num_processes = max(1, (os.cpu_count() or 1) - 2)
    return ProcessPoolExecutor(num_processes, get_context("spawn"), launch_nothing)


def launch_nothing() -> None:
    """Let this process compile kernels but run none: another one is measuring."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, warmup=True, **options)

    def no_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return input.new_empty(len(input), len(weight))

    JITFunction.run = compile_only
    functional.linear = no_product


def compile_variant(shape: Shape, num_rows: int, variant: Variant) -> str | None:
    """Leave a variant's kernels in Triton's cache on disk; return why that failed, if it did."""
    if torch.cuda.memory_reserved() > MAX_RESERVED_BYTES:
        torch.cuda.empty_cache()
    x = torch.empty(num_rows, shape.num_in, device="cuda", dtype=DTYPE)
    weight = torch.empty(shape.num_out, shape.num_in, device="cuda", dtype=DTYPE)
    try:
        variant.run(x, weight)
    except Exception as error:  # the compiler's, of many kinds, and not all can be sent
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
