"""FP8 weights with a float scale for each block of outputs and inputs, 128 x 128 in most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.quantised.stored_weight import Parts, check_matrix, check_part, read_part
from nanovllm.checkpoint.weights import FLOATS, Codes, StoredTensor
from nanovllm.quantisation import CodeLayout, Quantisation


@dataclass(frozen=True, slots=True)
class BlockFp8:
    codes: StoredTensor  # [outputs, inputs]
    scales: StoredTensor  # [blocks of outputs, blocks of inputs], by which codes are multiplied
    cuts: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("fp8", self.cuts[1])

    def codes_of(self, rows: slice, columns: slice) -> Codes:
        codes = read_part(self.codes, rows, columns)
        by_output = self._read_scales(rows, columns).repeat_interleave(self.cuts[0], 0)
        return Codes(codes, by_output[: len(codes)], None)

    def widen(self, rows: slice, columns: slice) -> Tensor:
        high, wide = self.cuts
        codes = read_part(self.codes, rows, columns).float()
        scales = self._read_scales(rows, columns).repeat_interleave(wide, 1)
        scales = scales[:, : codes.shape[1]]  # the last block may be cut short
        for first in range(0, len(codes), high):
            codes[first : first + high] *= scales[first // high]
        return codes

    def _read_scales(self, rows: slice, columns: slice) -> Tensor:
        """Of the blocks that some outputs and inputs have, from the first of one on."""
        high, wide = self.cuts
        blocks = (
            slice(rows.start // high, -(-rows.stop // high)),
            slice(columns.start // wide, -(-columns.stop // wide)),
        )
        return read_part(self.scales, *blocks).float()


def open_fp8_block(parts: Parts, quantisation: Quantisation) -> BlockFp8:
    block = quantisation.block_size
    assert block is not None
    codes = parts["weight"]
    [scales] = (part for name, part in parts.items() if name != "weight")
    rows, columns = check_matrix(codes, torch.float8_e4m3fn)
    check_part(scales, (-(-rows // block[0]), -(-columns // block[1])), *FLOATS)
    return BlockFp8(codes, scales, block)
