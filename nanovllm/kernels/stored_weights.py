"""Weights kept as quantised codes: how they lie in memory, and what they mean in plain torch.

A weight is (code - zero) * scale. The inputs of an output share a scale, or 128 or fewer do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fp8 import ScaledCodes, round_rows, round_to_codes

BLOCK = 128  # inputs whose codes lie together; a group is one such, or a half or a quarter of it
WORDS = 16  # of a block: the word w has in its bits 4 * n the code of input 16 * n + w
INT4_GROUPS = (32, 64, BLOCK)
MIDDLE = 8  # the zero point of 4 bits where none is stored


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    codes: Tensor  # [outputs, inputs], FP8
    scales: Tensor  # float32 [outputs, 1], or of every 128 inputs: [outputs, blocks]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def has_blocks(self) -> bool:
        return self.scales.shape[1] > 1

    def widen(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales
        if self.has_blocks:
            scales = scales.repeat_interleave(BLOCK, 1)[:, : self.codes.shape[1]]
        return (self.codes.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    words: Tensor  # int32 [outputs, blocks * WORDS], whose inputs are padded to whole blocks
    scales: Tensor  # [outputs, groups]
    zeros: Tensor | None  # uint8 [outputs, groups]; None: MIDDLE
    num_in: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.num_in

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.words.nbytes + self.scales.nbytes + zeros

    @property
    def group(self) -> int:
        return BLOCK * (self.words.shape[1] // WORDS) // self.scales.shape[1]

    def widen(self, dtype: torch.dtype) -> Tensor:
        codes = unpack_words(self.words).float()
        zeros = MIDDLE if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = codes.view(*self.scales.shape, -1) - zeros
        values = grouped * self.scales.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.num_in].to(dtype)


def num_blocks(num_in: int) -> int:
    return -(-num_in // BLOCK)


def pack_words(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits [outputs, inputs], in bytes, as Int4Weight has them."""
    padded = F.pad(codes, (0, -codes.shape[1] % BLOCK))
    nibbles = padded.view(len(codes), -1, BLOCK // WORDS, WORDS)
    words = torch.zeros(len(codes), nibbles.shape[1], WORDS, dtype=torch.int32, device=codes.device)
    for n in range(BLOCK // WORDS):
        words |= nibbles[:, :, n].int() << 4 * n
    return words.flatten(1)


def unpack_words(words: Tensor) -> Tensor:
    """Return the codes [outputs, blocks * 128] as bytes."""
    blocks = words.view(len(words), -1, 1, WORDS)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(-1, 1)
    return ((blocks >> shifts) & 15).to(torch.uint8).flatten(1)


def quantise_blocks(values: Tensor) -> ScaledCodes:
    """Round to FP8 by the largest numbers of blocks of 128 x 128; scales are repeated by row."""
    num_rows, num_in = values.shape
    padded = F.pad(values.float(), (0, -num_in % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    rounded = round_to_codes(blocks, blocks.abs().amax((1, 3), keepdim=True))
    scales = rounded.scales[:, 0, :, 0].repeat_interleave(BLOCK, 0)[:num_rows]
    return ScaledCodes(rounded.codes.view_as(padded)[:num_rows, :num_in], scales)


def quantise_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [outputs, inputs] around MIDDLE, and scales [outputs, groups]."""
    num_in = values.shape[1]
    parts = F.pad(values.float(), (0, -num_in % group)).view(len(values), -1, group)
    scales = parts.abs().amax(2).clamp_(min=1e-6) / (MIDDLE - 1)
    codes = (parts / scales.unsqueeze(2)).round_().add_(MIDDLE).clamp_(0, 15)
    return codes.flatten(1)[:, :num_in].to(torch.uint8), scales


def quantise_rows(x: Tensor, by_block: bool = False) -> ScaledCodes:
    """Round the rows of x to FP8 by their largest numbers, or those of every 128 inputs."""
    if not by_block:
        return round_rows(x.float())
    num_in = x.shape[1]
    parts = F.pad(x.float(), (0, -num_in % BLOCK)).view(-1, BLOCK)
    rounded = round_rows(parts)
    codes = rounded.codes.view(len(x), -1)[:, :num_in].contiguous()
    return ScaledCodes(codes, rounded.scales.view(len(x), -1))


def quantised_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """What a product with quantised activations means: both sides are rounded to FP8."""
    rows = quantise_rows(x, weight.has_blocks)
    wide = Fp8Weight(rows.codes, rows.scales).widen(torch.float32)
    y = F.linear(wide, weight.widen(torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
