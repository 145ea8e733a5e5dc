"""GGUF's quantised weights as they are stored: rows of blocks, which kernels read.

What has no kernel is widened while it is loaded, as by the plain format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.kernels.cpu.blocks import Panels, to_panels
from nanovllm.kernels.ops import Activation, LinearFn, Ops, PackedLinear
from nanovllm.layers.gguf_experts import BlockExperts
from nanovllm.layers.plain_format import PLAIN, PlainLinear
from nanovllm.layers.shards import ExpectedTensor, Share
from nanovllm.layers.stored_blocks import (
    block_kernels,
    byte_columns,
    expect_blocks,
    has_whole_blocks,
)

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
