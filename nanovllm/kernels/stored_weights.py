"""Weights kept as quantised codes: how they lie in memory, and what they mean in plain torch.

A weight is (code - zero) * scale. The inputs of an output share a scale, or 128 or fewer do.

Inputs are cut into blocks of 128, the last of which is padded. A block is so many words of 32 bits
that hold one code each in every of their places, and the word w has in place n the code of input
n * words + w: what is in one place of the words of a block are inputs side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fp8 import FP8, ScaledCodes, round_rows, round_to_codes

BLOCK = 128
INT4_WORDS, FP8_WORDS = 16, 32  # of a block
INT4_GROUPS = (32, 64, BLOCK)
MIDDLE = 8  # the zero point of 4 bits where none is stored


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    codes: Tensor  # FP8 [outputs, blocks * BLOCK], as `order_codes` lays them out
    scales: Tensor  # float32 [outputs, 1], or of every 128 inputs: [outputs, blocks]
    num_in: int
    bits: ClassVar[int] = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_in

    @property
    def words(self) -> Tensor:
        return self.codes.view(torch.int32)  # [outputs, blocks * FP8_WORDS]

    def move_to(self, words: Tensor) -> None:
        """Let the codes be where somebody has copied them to."""
        self.codes.data = words.view(FP8)

    @property
    def zeros(self) -> None:
        return None

    @property
    def has_blocks(self) -> bool:
        return self.scales.shape[1] > 1

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all of an output's."""
        return BLOCK if self.has_blocks else 0

    def part(self, index: int, count: int) -> Fp8Weight:
        """One of so many equal parts of the outputs."""
        codes, scales = self.codes.chunk(count)[index], self.scales.chunk(count)[index]
        return Fp8Weight(codes, scales, self.num_in)

    def widen(self, dtype: torch.dtype) -> Tensor:
        codes = self.codes.view(len(self.codes), -1, FP8_WORDS, BLOCK // FP8_WORDS)
        values = codes.float().transpose(2, 3).reshape(*self.scales.shape, -1)
        return (values * self.scales.unsqueeze(2)).flatten(1)[:, : self.num_in].to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    words: Tensor  # int32 [outputs, blocks * INT4_WORDS]
    scales: Tensor  # [outputs, groups]
    zeros: Tensor | None  # uint8 [outputs, groups]; None: MIDDLE
    num_in: int
    bits: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.num_in

    def move_to(self, words: Tensor) -> None:
        """Let the codes be where somebody has copied them to."""
        self.words.data = words

    @property
    def group(self) -> int:
        return BLOCK * (self.words.shape[1] // INT4_WORDS) // self.scales.shape[1]

    def part(self, index: int, count: int) -> Int4Weight:
        """One of so many equal parts of the outputs."""
        zeros = None if self.zeros is None else self.zeros.chunk(count)[index]
        words, scales = self.words.chunk(count)[index], self.scales.chunk(count)[index]
        return Int4Weight(words, scales, zeros, self.num_in)

    def widen(self, dtype: torch.dtype) -> Tensor:
        codes = unpack_words(self.words).float()
        zeros = MIDDLE if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = codes.view(*self.scales.shape, -1) - zeros
        values = grouped * self.scales.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.num_in].to(dtype)


StoredWeight = Fp8Weight | Int4Weight


def num_blocks(num_in: int) -> int:
    return -(-num_in // BLOCK)


def order_codes(codes: Tensor) -> Tensor:
    """Lay codes of FP8 [outputs, inputs] out as Fp8Weight has them."""
    padded = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % BLOCK))
    blocks = padded.view(len(codes), -1, BLOCK // FP8_WORDS, FP8_WORDS)
    return blocks.transpose(2, 3).flatten(1).view(FP8)


def pack_words(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits [outputs, inputs], in bytes, as Int4Weight has them."""
    padded = F.pad(codes, (0, -codes.shape[1] % BLOCK))
    places = padded.view(len(codes), -1, BLOCK // INT4_WORDS, INT4_WORDS)
    shape = len(codes), places.shape[1], INT4_WORDS
    words = torch.zeros(shape, dtype=torch.int32, device=codes.device)
    for n in range(BLOCK // INT4_WORDS):
        words |= places[:, :, n].int() << 4 * n
    return words.flatten(1)


def unpack_words(words: Tensor) -> Tensor:
    """Return the codes [outputs, blocks * 128] as bytes."""
    blocks = words.view(len(words), -1, 1, INT4_WORDS)
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
    wide = Fp8Weight(order_codes(rows.codes), rows.scales, x.shape[1]).widen(torch.float32)
    y = F.linear(wide, weight.widen(torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
