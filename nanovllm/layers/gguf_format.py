"""GGUF's quantised weights as they are stored: rows of blocks, which kernels read.

What has no kernel is widened while it is loaded, as by the plain format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.kernels.cpu.block_types import TYPES
from nanovllm.kernels.cpu.blocks import BlockKernels, Panels, to_panels
from nanovllm.kernels.ops import Activation, LinearFn, Ops, PackedExperts, PackedLinear, Routing
from nanovllm.layers.plain_experts import PlainExperts
from nanovllm.layers.plain_format import PLAIN, PlainLinear
from nanovllm.layers.shards import ExpectedTensor, Share, expect_shares

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.layers.weight_format import ExpertNames, Outputs

logger = logging.getLogger(__name__)


class GGUFFormat:
    """`types` are those of a checkpoint's quantised tensors, by name."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self._told: set[str] = set()

    def linear(self, outputs: Outputs, inputs: Share, build: Build) -> BlockLinear:
        return BlockLinear(outputs, inputs, self, build)

    def table(self, outputs: Outputs, inputs: Share, build: Build) -> BlockLinear:
        return BlockLinear(outputs, inputs, self, build)

    def experts(
        self, num_experts: int, names: ExpertNames, hidden: Share, size: Share, build: Build
    ) -> BlockExperts:
        return BlockExperts(num_experts, names, hidden, size, self, build)

    def tell_widened(self, what: str, build: Build) -> None:
        """Log what takes more memory than its file, once."""
        if what not in self._told and build.device.type != "meta":
            self._told.add(what)
            dtype = str(build.dtype).removeprefix("torch.")
            logger.info("Quantised weights are widened to %s, as no kernel reads %s", dtype, what)


class BlockLinear(nn.Module):
    """Rows of blocks, or a plain weight: which, is clear once the names of its tensors are."""

    def __init__(
        self, outputs: Outputs, inputs: Share, weight_format: GGUFFormat, build: Build
    ) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.format, self.build = weight_format, build
        self.plain: PlainLinear | None = None
        self.kinds: list[str] = []
        self.rows = nn.ParameterList()  # of each tensor [outputs, bytes]
        self.panels: list[Panels] = []  # once it is packed, in place of the rows

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        names = [f"{parent}{name}.weight" for name in self.outputs]
        types = self.format.types
        self.kinds = [types[name] for name in names if name in types]
        has_all = len(self.kinds) == len(names)
        if not has_all or not all(has_whole_blocks(kind, self.inputs) for kind in self.kinds):
            self._tell_why()
            self.plain = PLAIN.linear(self.outputs, self.inputs, self.build)
            return self.plain.expected_tensors(parent)
        places = zip(names, self.kinds, self.outputs.values(), strict=True)
        return {name: self._expect_blocks(kind, shares) for name, kind, shares in places}

    def tied(self, outputs: Outputs) -> TiedBlocks:
        return TiedBlocks(self, outputs)

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        if self.plain is not None:
            return self.plain.pack(ops, bias, activation, has_room)
        return block_kernels(ops).pack_linear(self._pack_panels(), bias, activation)

    def pack_table(self, ops: Ops, scale: float) -> LinearFn:
        if self.plain is not None:
            return self.plain.pack_table(ops, scale)
        kernels, [table] = block_kernels(ops), self._pack_panels()
        return lambda token_ids: kernels.embed(token_ids, table, scale)

    def _tell_why(self) -> None:
        if self.kinds:
            is_mixed = len(self.kinds) < len(self.outputs)
            cut = "a rank's share of a block"
            what = "a projection of quantised and other tensors" if is_mixed else cut
            self.format.tell_widened(what, self.build)

    def _expect_blocks(self, kind: str, shares: list[Share]) -> ExpectedTensor:
        shape = sum(share.count for share in shares), byte_columns(kind, self.inputs).count
        rows = self.build.parameter(*shape, dtype=torch.uint8)
        self.rows.append(rows)
        return expect_blocks(kind, rows, shares, self.inputs)

    def _pack_panels(self) -> list[Panels]:
        """Join the rows of neighbours of one type."""
        if not self.panels:
            pairs = zip(self.kinds, self.rows, strict=True)
            for kind, group in groupby(pairs, key=lambda pair: pair[0]):
                parts = [rows for _, rows in group]
                rows = parts[0] if len(parts) == 1 else torch.cat(parts)
                self.panels.append(to_panels(kind, rows))
            self.rows = nn.ParameterList()
        return self.panels


class TiedBlocks(nn.Module):
    """The head's view of the embedding's weight."""

    def __init__(self, table: BlockLinear, outputs: Outputs) -> None:
        super().__init__()
        self.table, self.outputs = table, outputs

    def expected_tensors(self, parent: str) -> dict[str, ExpectedTensor]:
        plain = self.table.plain  # of blocks a GGUF file has no copy: it would not be tied
        return {} if plain is None else plain.tied(self.outputs).expected_tensors(parent)

    def pack(
        self, ops: Ops, bias: Tensor | None, activation: Activation | None, has_room: bool
    ) -> PackedLinear:
        return self.table.pack(ops, bias, activation, has_room)


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


def has_whole_blocks(kind: str, inputs: Share) -> bool:
    """Whether neither the tensor nor a rank's share of its columns cuts a block."""
    sizes = inputs.size, inputs.first, inputs.count
    return not any(size % TYPES[kind].size for size in sizes)


def byte_columns(kind: str, inputs: Share) -> Share:
    """The share in bytes of a row."""
    size, num_bytes = TYPES[kind].size, TYPES[kind].num_bytes
    return Share(
        *(count // size * num_bytes for count in (inputs.size, inputs.first, inputs.count))
    )


def expect_blocks(kind: str, target: Tensor, shares: list[Share], inputs: Share) -> ExpectedTensor:
    """Expect the blocks of a tensor, whose rows are some shares; those of padding become zeros."""
    assert target.dtype == torch.uint8
    if len(target) > sum(share.stored.stop - share.stored.start for share in shares):
        target.zero_()
    expected = expect_shares(target, shares, byte_columns(kind, inputs))
    return replace(expected, shape=(expected.shape[0], inputs.size), is_blocks=True)


def block_kernels(ops: Ops) -> BlockKernels:
    assert ops.blocks is not None, "only where there are kernels weights are kept as blocks"
    return ops.blocks
