"""Weights that stay quantized in memory: FP8 or int4 packed in words, or GGUF quant blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.checkpoint.quantized.weight_format import QuantLayout
from nanovllm.layers.shards import ExpectedTensor, Outputs, Shard, expect_stack, num_outputs
from nanovllm.ops.interface import BlockOps
from nanovllm.ops.quantized_weight import (
    BLOCK,
    INT4_GROUPS,
    PanelWeight,
    QuantizedRows,
    QuantizedWeight,
    num_blocks,
)

if TYPE_CHECKING:
    from nanovllm.layers.build import BuildContext


def create_quantized(
    outputs: Outputs, inputs: Shard, build: BuildContext, parent: str, is_uniform: bool
) -> WordTensors | BlockTensors | None:
    """Create the tensors of a weight in its quantized layouts.

    Returns None if a checkpoint tensor is to be dense, if the layouts differ although the weight is
    uniform, or if no kernel supports the layouts or this shard.
    """
    assert build.layouts is not None
    maybe_layouts = [build.layouts(f"{parent}{name}") for name in outputs]
    layouts = [layout for layout in maybe_layouts if layout is not None]
    if len(layouts) < len(maybe_layouts) or (is_uniform and len(set(layouts)) > 1):
        return None
    if not layouts[0].block_bytes:
        layout = common_layout(layouts, inputs)
        return None if layout is None else WordTensors(outputs, inputs, layout, build)
    if not all(has_whole_blocks(layout, inputs) for layout in layouts):
        return None
    return BlockTensors(layouts, outputs, inputs, build)


def common_layout(layouts: Sequence[QuantLayout], inputs: Shard) -> QuantLayout | None:
    """Return one layout for all tensors, or None.

    It is None if their kinds or group sizes differ, no kernel supports them, or this rank's shard
    splits a group.
    """
    if len({(layout.kind, layout.group) for layout in layouts}) > 1:
        return None
    kind, group = layouts[0].kind, layouts[0].group
    group = -1 if group >= inputs.size else group
    is_read = group == -1 or group % BLOCK == 0 or (kind == "int4" and group in INT4_GROUPS)
    is_cut = group != -1 and inputs.count < inputs.size and inputs.count % group > 0
    dtypes = {layout.scale_dtype for layout in layouts}
    has_zeros = any(layout.has_zeros for layout in layouts)
    scale_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    return QuantLayout(kind, group, has_zeros, scale_dtype) if is_read and not is_cut else None


class WordTensors(nn.Module):
    """An FP8 or int4 weight packed in 32-bit words; see `ops/quantized_weight.py`."""

    def __init__(
        self, outputs: Outputs, inputs: Shard, layout: QuantLayout, build: BuildContext
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.layout = outputs, inputs, layout
        self.bits = 8 if layout.kind == "fp8" else 4
        num_out, blocks = num_outputs(outputs), num_blocks(inputs.count)
        num_groups = blocks * (BLOCK // layout.group if 0 < layout.group < BLOCK else 1)
        num_groups = 1 if self.bits == 8 and layout.group == -1 else num_groups
        self.qweight = build.parameter(num_out, blocks * BLOCK * self.bits // 32, dtype=torch.int32)
        dtype = getattr(torch, layout.scale_dtype)
        self.scales = build.parameter(num_out, num_groups, dtype=dtype)
        self.zero_points: nn.Parameter | None = None
        if layout.has_zeros:
            self.zero_points = build.parameter(num_out, num_groups, dtype=torch.uint8)

    def expected_tensors(self) -> dict[str, ExpectedTensor]:
        rows = QuantizedRows(self.for_ops(), self.layout.group)
        return expect_stack(rows, self.outputs, self.inputs)

    def reorder(self, rows: Tensor) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data[rows]

    def for_ops(self, num_experts: int | None = None) -> QuantizedWeight:
        zeros = None if self.zero_points is None else self.zero_points.data
        qweight, scales = self.qweight.data, self.scales.data
        return QuantizedWeight(self.bits, qweight, scales, zeros, self.inputs.count)


class BlockTensors(nn.Module):
    """A weight in GGUF quant blocks: a tensor [outputs, bytes] per run of equal block types.

    After loading, the rows are interleaved into panels of 16 rows, which CPU kernels read.
    """

    def __init__(
        self, layouts: list[QuantLayout], outputs: Outputs, inputs: Shard, build: BuildContext
    ) -> None:
        super().__init__()
        self.inputs, self.ops = inputs, build.ops
        self.runs: list[tuple[QuantLayout, Outputs]] = []
        pairs = zip(layouts, outputs.items(), strict=True)
        for layout, group in groupby(pairs, key=lambda pair: pair[0]):
            self.runs.append((layout, dict(pair[1] for pair in group)))
        self.rows = nn.ParameterList(
            build.parameter(num_outputs(run), byte_columns(layout, inputs).count, dtype=torch.uint8)
            for layout, run in self.runs
        )
        self.weight: PanelWeight | None = None  # replaces `rows` once they are packed

    def expected_tensors(self) -> dict[str, ExpectedTensor]:
        tensors = {}
        for (layout, outputs), rows in zip(self.runs, self.rows, strict=True):
            shards = [shard for each in outputs.values() for shard in each]
            if any(shard.first + shard.count > shard.size for shard in shards):
                rows.zero_()  # padding is not in the checkpoint
            expected = expect_stack(rows, outputs, byte_columns(layout, self.inputs))
            for name, tensor in expected.items():
                shape = tensor.shape[0], self.inputs.size
                tensors[name] = replace(tensor, shape=shape, is_quantized=True)
        return tensors

    def reorder(self, rows: Tensor) -> None:
        first = 0
        for parameter in self.rows:
            last = first + len(parameter)
            parameter.data = parameter.data[rows[first:last] - first]
            first = last

    def for_ops(self, num_experts: int | None = None) -> PanelWeight:
        if self.weight is None:
            assert isinstance(self.ops, BlockOps)
            parts = []
            for layout, _ in self.runs:
                rows = self.rows[0].view(num_experts or 1, -1, self.rows[0].shape[1])
                parts.append(self.ops.pack_blocks(layout.kind, rows))
                self.rows = self.rows[1:]  # free each tensor before the next is packed
            self.weight = PanelWeight(tuple(parts))
        return self.weight


def has_whole_blocks(layout: QuantLayout, inputs: Shard) -> bool:
    """Return whether the tensor and this rank's shard of its columns consist of whole blocks."""
    return not any(size % layout.group for size in (inputs.size, inputs.first, inputs.count))


def byte_columns(layout: QuantLayout, inputs: Shard) -> Shard:
    """Convert a shard of inputs to the range of bytes that it occupies in a row of quant blocks."""
    sizes = inputs.size, inputs.first, inputs.count
    return Shard(*(size // layout.group * layout.block_bytes for size in sizes))
