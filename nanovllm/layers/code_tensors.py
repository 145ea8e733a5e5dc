"""The tensors of a weight that stays quantised: codes, scales and zero points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.fp8 import FP8
from nanovllm.kernels.stored_weights import (
    BLOCK,
    INT4_GROUPS,
    INT4_WORDS,
    Fp8Weight,
    Int4Weight,
    StoredWeight,
    num_blocks,
)
from nanovllm.kernels.weight_rows import WeightRows
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares
from nanovllm.quantisation import CodeLayout

if TYPE_CHECKING:
    from nanovllm.layers.build import Build

Layouts = Callable[[str], CodeLayout | None]  # by module; None: floats, or to be widened


def common_layout(found: Sequence[CodeLayout | None], inputs: Share) -> CodeLayout | None:
    """The one that all stored weights of a projection have, if kernels read such."""
    layouts = [layout for layout in found if layout is not None]
    if len(layouts) < len(found) or len({(x.kind, x.group) for x in layouts}) > 1:
        return None
    kind, group = layouts[0].kind, layouts[0].group
    group = -1 if group >= inputs.size else group
    is_read = group == -1 or group % BLOCK == 0 or (kind == "int4" and group in INT4_GROUPS)
    dtypes = {layout.scale_dtype for layout in layouts}
    has_zeros = any(layout.has_zeros for layout in layouts)
    scale_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    return CodeLayout(kind, group, has_zeros, scale_dtype) if is_read else None


class CodeTensors(nn.Module):
    def __init__(self, num_out: int, inputs: Share, layout: CodeLayout, build: Build) -> None:
        super().__init__()
        self.inputs, self.layout = inputs, layout
        self.zeros: nn.Parameter | None = None
        make, blocks = build.parameter, num_blocks(inputs.count)
        if layout.kind == "fp8":
            self.codes = make(num_out, blocks * BLOCK, dtype=FP8)
            self.scales = make(num_out, 1 if layout.group == -1 else blocks, dtype=torch.float32)
            return
        num_groups = blocks * (BLOCK // layout.group if 0 < layout.group < BLOCK else 1)
        self.codes = make(num_out, blocks * INT4_WORDS, dtype=torch.int32)
        self.scales = make(num_out, num_groups, dtype=getattr(torch, layout.scale_dtype))
        if layout.has_zeros:
            self.zeros = make(num_out, num_groups, dtype=torch.uint8)

    @property
    def weight(self) -> StoredWeight:
        codes, scales, num_in = self.codes.data, self.scales.data, self.inputs.count
        if codes.dtype == FP8:
            return Fp8Weight(codes, scales, num_in)
        return Int4Weight(codes, scales, None if self.zeros is None else self.zeros.data, num_in)

    def expect(self, first: int, shares: list[Share]) -> ExpectedTensor:
        """Expect a tensor of which shares of outputs go to the rows from `first` on."""
        expected = expect_shares(self.codes[first:], shares, self.inputs)
        weight, parts = self.weight, []
        for share, part in zip(shares, expected.parts, strict=True):
            parts.append(WeightRows(weight, first, len(part.target), self.layout.group))
            first += share.count
        return ExpectedTensor(expected.shape, expected.parts, codes=tuple(parts))
