"""Quantised safetensors as they are stored: codes and scales, which a device's kernels read.

What has no kernel is widened while it is loaded, as by the plain format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.fp8 import FP8
from nanovllm.kernels.ops import Activation, Ops, PackedLinear
from nanovllm.kernels.stored_weights import (
    BLOCK,
    INT4_GROUPS,
    INT4_WORDS,
    Fp8Weight,
    Int4Weight,
    num_blocks,
)
from nanovllm.kernels.weight_rows import WeightRows
from nanovllm.layers.plain_experts import PlainExperts
from nanovllm.layers.plain_format import PLAIN, PlainLinear
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares, num_outputs
from nanovllm.quantisation import CodeLayout

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.weight_format import ExpertNames, Outputs

Layouts = Callable[[str], CodeLayout | None]  # by module; None: floats, or to be widened


class CodeFormat:
    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts

    def linear(self, outputs: Outputs, inputs: Share, build: Build) -> CodeLinear:
        return CodeLinear(outputs, inputs, self.layouts, build)

    def table(self, outputs: Outputs, inputs: Share, build: Build) -> PlainLinear:
        return PLAIN.table(outputs, inputs, build)

    def experts(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> PlainExperts:
        return PLAIN.experts(num_experts, names, hidden, size, build)


class CodeLinear(nn.Module):
    """Codes and scales, or a plain weight: which, is clear once the names of its tensors are."""

    def __init__(self, outputs: Outputs, inputs: Share, layouts: Layouts, build: Build) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.layouts, self.build = layouts, build
        self.plain: PlainLinear | None = None
        self.codes: nn.Parameter | None = None
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        layout = self._layout([f"{parent}{name}" for name in self.outputs])
        if layout is None:
            self.plain = PLAIN.linear(self.outputs, self.inputs, self.build)
            return self.plain.expected_tensors(parent)
        self._make(layout)
        weight, tensors, first = self._weight(), {}, 0
        for name, shares in self.outputs.items():
            rows = weight.codes if isinstance(weight, Fp8Weight) else weight.words
            expected = expect_shares(rows[first:], shares, self.inputs)
            parts = []
            for share, part in zip(shares, expected.parts, strict=True):
                parts.append(WeightRows(weight, first, len(part.target), layout.group))
                first += share.count
            tensors[f"{parent}{name}.weight"] = ExpectedTensor(
                expected.shape, expected.parts, codes=tuple(parts)
            )
        return tensors

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        if self.plain is not None:
            return self.plain.pack(ops, bias, activation, has_room)
        return ops.pack_codes(self._weight(), bias, activation)

    def _layout(self, modules: list[str]) -> CodeLayout | None:
        """The one that all stored weights of this projection have, if kernels read such."""
        found = [self.layouts(module) for module in modules]
        layouts = [layout for layout in found if layout is not None]
        if len(layouts) < len(modules) or len({(x.kind, x.group) for x in layouts}) > 1:
            return None
        kind, group = layouts[0].kind, layouts[0].group
        group = -1 if group >= self.inputs.size else group
        is_read = group == -1 or group % BLOCK == 0 or (kind == "int4" and group in INT4_GROUPS)
        dtypes = {layout.scale_dtype for layout in layouts}
        has_zeros = any(layout.has_zeros for layout in layouts)
        scale_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        return CodeLayout(kind, group, has_zeros, scale_dtype) if is_read else None

    def _make(self, layout: CodeLayout) -> None:
        num_out, num_in, make = num_outputs(self.outputs), self.inputs.count, self.build.parameter
        blocks = num_blocks(num_in)
        if layout.kind == "fp8":
            self.codes = make(num_out, blocks * BLOCK, dtype=FP8)
            self.scales = make(num_out, 1 if layout.group == -1 else blocks, dtype=torch.float32)
            return
        num_groups = blocks * (BLOCK // layout.group if 0 < layout.group < BLOCK else 1)
        self.codes = make(num_out, blocks * INT4_WORDS, dtype=torch.int32)
        self.scales = make(num_out, num_groups, dtype=getattr(torch, layout.scale_dtype))
        if layout.has_zeros:
            self.zeros = make(num_out, num_groups, dtype=torch.uint8)

    def _weight(self) -> Fp8Weight | Int4Weight:
        assert self.codes is not None
        assert self.scales is not None
        if self.codes.dtype == FP8:
            return Fp8Weight(self.codes.data, self.scales.data, self.inputs.count)
        zeros = None if self.zeros is None else self.zeros.data
        return Int4Weight(self.codes.data, self.scales.data, zeros, self.inputs.count)
