"""Weights in GGUF quant blocks: read directly for few rows of x, dequantized for many rows.

A panel interleaves the quant blocks of 16 weight rows (kernels/block_types.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.devices.cpu.kernels.block_kernels import TILES, compile_dequantizer, compile_linear
from nanovllm.devices.cpu.kernels.block_types import TYPES, pack_panels
from nanovllm.devices.cpu.program import Argument, float_bits
from nanovllm.ops.interface import LinearFn
from nanovllm.ops.quantized_weight import PANEL_ROWS, Panels, PanelWeight
from nanovllm.ops.torch_linear import PIECE_SIZE

if TYPE_CHECKING:
    from nanovllm.devices.cpu.ops import NumbaOps


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (token, expert) pairs of a batch, sorted by expert."""

    order: Tensor  # int32 [pairs]: token * top_k + rank of the expert
    starts: Tensor  # int32 [experts + 1]: first pair of each expert in `order`, then len(order)
    max_rows: int  # upper bound on the number of pairs of one expert


def to_panels(kind: str, rows: Tensor) -> Panels:
    """Interleave rows of quant blocks, [rows, bytes] or [experts, rows, bytes], into panels."""
    *_, num_rows, num_bytes = rows.shape
    num_in = num_bytes // TYPES[kind].num_bytes * TYPES[kind].size
    experts = rows.view(-1, num_rows, num_bytes).numpy()
    num_panels = -(-num_rows // PANEL_ROWS)
    data = torch.empty(len(experts) * num_panels, num_bytes * PANEL_ROWS, dtype=torch.uint8)
    for part, target in zip(
        experts, data.numpy().reshape(len(experts), num_panels, -1), strict=True
    ):
        pack_panels(part, TYPES[kind], target)
    return Panels(kind, data, num_rows, num_in)


class BlockKernels:
    """The kernels for the quant block types of a model, each compiled once."""

    def __init__(self, ops: NumbaOps, matmul_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        self._ops, self._launcher = ops, ops.launcher
        # The dtypes of GEMMs with many rows of x, and of their results.
        self._matmul_dtype, self._out_dtype = matmul_dtype, out_dtype
        self._linears: dict[str, Any] = {}  # keyed by quant block type
        self._dequantizers: dict[str, Any] = {}
        self._piece = torch.empty(0, dtype=matmul_dtype)  # output buffer of `_dequantize`

    def compile(self, *weights: PanelWeight) -> None:
        for weight in weights:
            for part in weight.parts:
                self._compile(part.kind)

    def linear(self, weight: PanelWeight, bias: Tensor | None) -> LinearFn:
        self.compile(weight)
        num_out, max_rows = weight.num_out, self._ops.max_linear_rows

        def run(x: Tensor) -> Tensor:
            num_rows = x.shape[0]
            if num_rows > max_rows:
                return self.multiply_many(x, weight, bias)
            x = x.contiguous()
            y = self._launcher.empty(num_rows, num_out, dtype=self._out_dtype)
            first = 0
            for part in weight.parts:
                self._few(x, y, part, bias, first)
                first += part.num_out
            return y

        return run

    def embed(self, token_ids: Tensor, weight: PanelWeight, scale: float) -> Tensor:
        """Implement Ops.embed for a quantized table."""
        [table] = weight.parts
        launcher, num_rows, num_in = self._launcher, len(token_ids), table.num_in
        out = launcher.empty(num_rows, num_in)
        panels = launcher.scratch(launcher.num_threads * num_in * PANEL_ROWS)
        self._compile(table.kind)
        lookup = num_in, num_rows, out, token_ids, float_bits(scale)
        launcher.call(self._dequantizers[table.kind].address, panels, table.data, *lookup)
        return out

    def multiply_pairs(self, x: Tensor, weight: PanelWeight, pairs: Pairs) -> Tensor:
        """Multiply each pair's row of x (one row per token or per pair) by its expert's weight."""
        [panels] = weight.parts
        y = self._launcher.empty(len(pairs.order), panels.num_out)
        self._few(x, y, panels, None, 0, pairs)
        return y

    def _few(
        self,
        x: Tensor,
        y: Tensor,
        part: Panels,
        bias: Tensor | None,
        first: int,
        pairs: Pairs | None = None,
    ) -> None:
        """Multiply few rows of x by one part of a weight; store the result in y[:, first:]."""
        launcher, num_rows = self._launcher, len(x)
        grouping: tuple[Argument, ...] = None, None, 1, 1
        if pairs is not None:
            num_experts, per_row = len(pairs.starts) - 1, len(pairs.order) // max(len(x), 1)
            num_rows, grouping = pairs.max_rows, (pairs.order, pairs.starts, num_experts, per_row)
        num_groups = part.num_in // TYPES[part.kind].group_size
        per_thread = num_rows * (part.num_in + num_groups) + TILES[0] * PANEL_ROWS
        scratch = launcher.scratch(launcher.num_threads * per_thread)
        part_bias = None if bias is None else bias[first:]
        tensors = y[:, first:], x, part.data, part_bias, scratch
        sizes = num_rows, part.num_out, part.num_in, y.shape[1]
        launcher.call(self._linears[part.kind].address, *tensors, *sizes, *grouping)

    def multiply_many(self, x: Tensor, weight: PanelWeight, bias: Tensor | None = None) -> Tensor:
        """Multiply many rows of x by a weight, dequantizing about PIECE_SIZE elements at a time."""
        upcast_x, num_out = x.to(self._matmul_dtype), weight.num_out
        upcast_bias = None if bias is None else bias.to(upcast_x.dtype)
        if num_out * x.shape[1] <= PIECE_SIZE:  # a single GEMM: its result needs no copy
            y = F.linear(upcast_x, self._dequantize(weight.parts), upcast_bias)
            return y.to(self._out_dtype)
        y, column = x.new_empty(len(x), num_out, dtype=self._out_dtype), 0
        for part in weight.parts:
            num_panels = max(PIECE_SIZE // (part.num_in * PANEL_ROWS), 1)
            for first in range(0, len(part.data), num_panels):
                rows = self._dequantize([part.rows(first, num_panels)])
                columns = slice(column, column + len(rows))
                part_bias = None if upcast_bias is None else upcast_bias[columns]
                y[:, columns] = F.linear(upcast_x, rows, part_bias)
                column += len(rows)
        return y

    def _dequantize(self, parts: Sequence[Panels]) -> Tensor:
        """Dequantize to the GEMM dtype, into a buffer that the next call overwrites."""
        num_in, num_rows = parts[0].num_in, sum(part.num_out for part in parts)
        size = (num_rows + PANEL_ROWS) * num_in
        if len(self._piece) < size:
            self._piece = torch.empty(size, dtype=self._matmul_dtype)
        weight, first = self._piece[: num_rows * num_in].view(num_rows, num_in), 0
        for part in parts:
            # The last panel of a part may have padding rows, which the next part overwrites.
            rows, sizes = self._piece[first * num_in :], (num_in, len(part.data), 0, 0, 0)
            self._launcher.call(self._dequantizers[part.kind].address, rows, part.data, *sizes)
            first += part.num_out
        return weight

    def _compile(self, kind: str) -> None:
        if kind in self._linears:
            return
        compiler, dtype = self._launcher.compiler, self._launcher.dtype
        self._linears[kind] = compile_linear(compiler, kind, dtype, self._out_dtype)
        self._dequantizers[kind] = compile_dequantizer(compiler, kind, dtype, self._matmul_dtype)
