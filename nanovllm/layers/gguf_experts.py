"""Experts as GGUF stores them: of each projection the blocks of all experts, read by kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.kernels.cpu.blocks import to_panels
from nanovllm.kernels.ops import Ops, PackedExperts, Routing
from nanovllm.layers.plain_experts import PlainExperts
from nanovllm.layers.shards import ExpectedTensor, Share
from nanovllm.layers.stored_blocks import (
    block_kernels,
    byte_columns,
    expect_blocks,
    has_whole_blocks,
)

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.gguf_format import GGUFFormat
    from nanovllm.layers.weight_format import ExpertNames


class BlockExperts(nn.Module):
    """Blocks of all three projections, or plain weights: which, is clear once there are names."""

    def __init__(
        self,
        num_experts: int,
        names: ExpertNames,
        hidden: Share,
        size: Share,
        weight_format: GGUFFormat,
        build: Build,
    ) -> None:
        super().__init__()
        self.num_experts, self.names = num_experts, names
        # Of gate, up and down: their inputs, and their outputs.
        self.sides = [(hidden, size), (hidden, size), (size, hidden)]
        self.format, self.build = weight_format, build
        self.plain: PlainExperts | None = None
        self.kinds: list[str] = []
        self.rows = nn.ParameterList()  # of each projection [experts, outputs, bytes]

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        names, types = [self.names.gate, self.names.up, self.names.down], self.format.types
        stored = [f"{parent}experts.*.{name}.weight" for name in names]
        self.kinds = [types[name] for name in stored if name in types]
        if not self._is_read():
            hidden, size = self.sides[0]
            self.plain = PlainExperts(self.num_experts, self.names, hidden, size, self.build)
            return self.plain.expected_tensors(parent)
        tensors = {}
        for name, kind, (inputs, outputs) in zip(names, self.kinds, self.sides, strict=True):
            shape = self.num_experts, outputs.count, byte_columns(kind, inputs).count
            rows = self.build.parameter(*shape, dtype=torch.uint8)
            self.rows.append(rows)
            for i, target in enumerate(rows):
                expected = expect_blocks(kind, target, [outputs], inputs)
                tensors[f"{parent}experts.{i}.{name}.weight"] = expected
        return tensors

    def pack(self, ops: Ops, routing: Routing) -> PackedExperts:
        if self.plain is not None:
            return self.plain.pack(ops, routing)
        panels = []
        for kind in self.kinds:
            panels.append(to_panels(kind, self.rows[0]))
            self.rows = self.rows[1:]  # so that no more than one is held twice
        gate, up, down = panels
        return block_kernels(ops).pack_experts(gate, up, down, self.num_experts, routing)

    def _is_read(self) -> bool:
        """Whether there is a kernel for what is stored; if not, log why."""
        if not self.kinds:
            return False
        if len(self.kinds) < len(self.sides):
            self.format.tell_widened("experts of quantised and other tensors", self.build)
            return False
        pairs = zip(self.kinds, self.sides, strict=True)
        if not all(has_whole_blocks(kind, inputs) for kind, (inputs, _) in pairs):
            self.format.tell_widened("a rank's share of a block", self.build)
            return False
        return True
