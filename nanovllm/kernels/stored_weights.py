"""Weights kept as quantised codes: how they lie in memory, and what they mean in plain torch.

A weight is (code - zero) * scale. The inputs of an output share a scale, or 128 or fewer do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # inputs whose codes lie together; a group is one such, or a half or a quarter of it
WORDS = 16  # of a block: the word w has in its bits 4 * n the code of input 16 * n + w
INT4_GROUPS = (32, 64, BLOCK)
MIDDLE = 8  # the zero point of 4 bits where none is stored
LARGEST_FP8 = 448.0
SMALLEST_LARGEST = 1e-30  # what stands for the largest number of a row of zeros
FP8 = torch.float8_e4m3fn


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


def quantise_blocks(values: Tensor) -> ScaledRows:
    """Round to FP8 by the largest numbers of blocks of 128 x 128; scales are repeated by row."""
    num_rows, num_in = values.shape
    padded = F.pad(values.float(), (0, -num_in % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    largest = blocks.abs().amax((1, 3)).clamp_(min=SMALLEST_LARGEST)
    codes = (blocks * (LARGEST_FP8 / largest)[:, None, :, None]).clamp_(-LARGEST_FP8, LARGEST_FP8)
    scales = (largest / LARGEST_FP8).repeat_interleave(BLOCK, 0)[:num_rows]
    return ScaledRows(codes.view_as(padded)[:num_rows, :num_in].to(FP8), scales)


def quantise_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [outputs, inputs] around MIDDLE, and scales [outputs, groups]."""
    num_in = values.shape[1]
    parts = F.pad(values.float(), (0, -num_in % group)).view(len(values), -1, group)
    scales = parts.abs().amax(2).clamp_(min=1e-6) / (MIDDLE - 1)
    codes = (parts / scales.unsqueeze(2)).round_().add_(MIDDLE).clamp_(0, 15)
    return codes.flatten(1)[:, :num_in].to(torch.uint8), scales


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Activations that are quantised token by token, or by token and 128 inputs."""

    codes: Tensor  # [rows, inputs], FP8
    scales: Tensor  # float32 [rows, 1] or [rows, blocks]

    def widen(self) -> Tensor:
        return Fp8Weight(self.codes, self.scales).widen(torch.float32)


def quantise_rows(x: Tensor, by_block: bool = False) -> ScaledRows:
    """Round the rows of x to FP8 by their largest numbers."""
    num_in = x.shape[1]
    padded = F.pad(x.float(), (0, -num_in % BLOCK)) if by_block else x.float()
    parts = padded.view(len(x), -1, BLOCK) if by_block else padded.unsqueeze(1)
    largest = parts.abs().amax(2).clamp_(min=SMALLEST_LARGEST)
    scaled = parts * (torch.full_like(largest, LARGEST_FP8) / largest).unsqueeze(2)
    codes = scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    return ScaledRows(codes.flatten(1)[:, :num_in].contiguous(), largest * (1 / LARGEST_FP8))


def quantised_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """What a product with quantised activations means: both sides are rounded to FP8."""
    rows = quantise_rows(x, weight.has_blocks)
    y = F.linear(rows.widen(), weight.widen(torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
