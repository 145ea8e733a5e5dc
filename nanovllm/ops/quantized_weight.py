"""A quantized weight: its layout in memory, and its dequantization in plain torch.

A weight is (q - zero point) * scale, where q is FP8 (e4m3) or an unsigned 4-bit integer. Scales are
per output channel, or group-wise with a group size of at most 128.

Inputs are split into blocks of 128, and the last block is padded. A block takes W words of 32 bits:
32 in FP8 and 16 in int4. Position n of word w holds the value of the block's input n * W + w, so
the same position of adjacent words holds adjacent inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.fp8 import FP8

BLOCK = 128
FP8_WORDS = 32  # number of words per block
INT4_GROUPS = (32, 64, BLOCK)
PANEL_ROWS = 16  # rows per panel; a panel interleaves the GGUF quant blocks of its rows
MIDDLE = 8  # default zero point of int4

Fill = Callable[[Tensor, Tensor], object]  # fill(target, rows), such as the device's `fill`


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    bits: int  # 8: FP8; 4: integers
    qweight: Tensor  # int32 [outputs, words]
    # int4: [outputs, groups]; FP8: float32 [outputs, 1] or [outputs, blocks]
    scales: Tensor
    zero_points: Tensor | None  # uint8 [outputs, groups], int4 only; None: all are MIDDLE
    num_in: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[0], self.num_in

    @property
    def num_words(self) -> int:
        """Number of words per row."""
        return self.qweight.shape[1]

    @property
    def fp8(self) -> Tensor:
        """The FP8 values [outputs, blocks * 128], in the order of the words' bytes."""
        assert self.bits == 8
        return self.qweight.view(FP8)

    @property
    def has_blocks(self) -> bool:
        """Whether this is an FP8 weight with one scale per 128 inputs."""
        return self.bits == 8 and self.scales.shape[1] > 1

    @property
    def group(self) -> int:
        """Number of inputs that share a scale; 0: one scale per output channel."""
        if self.bits == 8 and not self.has_blocks:
            return 0
        return BLOCK * num_blocks(self.num_in) // self.scales.shape[1]

    def __getitem__(self, outputs: slice) -> QuantizedWeight:
        zeros = None if self.zero_points is None else self.zero_points[outputs]
        qweight, scales = self.qweight[outputs], self.scales[outputs]
        return QuantizedWeight(self.bits, qweight, scales, zeros, self.num_in)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        values = unpack_words(self.qweight, self.bits).float().view(*self.scales.shape, -1)
        if self.bits == 4:
            zeros = self.zero_points
            values = values - (MIDDLE if zeros is None else zeros.float().unsqueeze(-1))
        values = values * self.scales.float().unsqueeze(-1)
        return values.flatten(1)[:, : self.num_in].to(dtype)


@dataclass(frozen=True, slots=True)
class Panels:
    """Rows of one GGUF quant block type, interleaved into panels of 16 rows for CPU kernels."""

    kind: str
    data: Tensor  # [panels, bytes], expert by expert
    num_out: int  # number of outputs per expert
    num_in: int

    def rows(self, first: int, num_panels: int) -> Panels:
        num_out = min(num_panels * PANEL_ROWS, self.num_out - first * PANEL_ROWS)
        return Panels(self.kind, self.data[first : first + num_panels], num_out, self.num_in)


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight in GGUF quant blocks; its rows are those of its parts, concatenated."""

    parts: tuple[Panels, ...]

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def num_experts(self) -> int:
        [panels] = self.parts
        return len(panels.data) // -(-panels.num_out // PANEL_ROWS)

    def of_expert(self, expert: int) -> PanelWeight:
        [panels] = self.parts
        count = -(-panels.num_out // PANEL_ROWS)
        data = panels.data[expert * count : (expert + 1) * count]
        return PanelWeight((Panels(panels.kind, data, panels.num_out, panels.num_in),))


Weight = Tensor | QuantizedWeight | PanelWeight


def num_blocks(num_in: int) -> int:
    return -(-num_in // BLOCK)


def pack_words(values: Tensor) -> Tensor:
    """Pack values [outputs, inputs], FP8 or 4-bit integers (one per byte), into int32 words."""
    bits = 8 if values.dtype == FP8 else 4
    padded = F.pad(values.view(torch.uint8), (0, -values.shape[1] % BLOCK))
    positions = padded.view(len(values), -1, 32 // bits, BLOCK * bits // 32)
    if bits == 8:
        return positions.transpose(2, 3).flatten(1).view(torch.int32)
    words = positions[:, :, 0].int()
    for n in range(1, 8):
        words |= positions[:, :, n].int() << 4 * n
    return words.flatten(1)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the values [outputs, blocks * 128], FP8 or 4-bit integers (one per byte)."""
    blocks = words.view(len(words), -1, 1, BLOCK * bits // 32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device).view(-1, 1)
    values = ((blocks >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)
    return values.view(FP8) if bits == 8 else values


@dataclass(frozen=True, slots=True)
class QuantizedPiece:
    """Some rows of a quantized weight; dequantized, they are (values - zeros) * scales."""

    values: Tensor  # [rows, inputs]: FP8, or integers (one per byte)
    scales: Tensor  # [rows, groups]
    zeros: Tensor | int = 0  # uint8 [rows, groups], or one zero point for all
    group_of: Tensor | None = None  # group of each input; None: consecutive groups of equal size

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Some rows of a quantized weight, as the target of a checkpoint tensor."""

    weight: QuantizedWeight  # a view of these rows
    group: int  # group size in the checkpoint; -1: one scale per output channel

    def __len__(self) -> int:
        return len(self.weight.qweight)

    def __getitem__(self, rows: slice) -> QuantizedRows:
        return QuantizedRows(self.weight[rows], self.group)

    @property
    def nbytes(self) -> int:
        return self.weight.qweight.nbytes

    def put(self, piece: QuantizedPiece, fill: Fill) -> None:
        """Fill all rows; scales and zero points are per checkpoint group."""
        weight, values, zeros = self.weight, piece.values, piece.zeros
        fill(weight.scales, self._by_group(piece.scales))
        staged = torch.empty(values.shape, dtype=values.dtype, device=weight.qweight.device)
        fill(staged, values)
        weight.qweight.copy_(pack_words(staged))
        if weight.zero_points is not None:
            if isinstance(zeros, int):
                zeros = torch.full_like(piece.scales, zeros, dtype=torch.uint8)
            fill(weight.zero_points, self._by_group(zeros))

    def put_random(self, values: Tensor) -> None:
        """Fill all rows with 0.02 * `values`, quantized; the values are standard normal."""
        if self.weight.bits == 8:
            quantized, scale = values.to(FP8), 0.02
        else:
            quantized, scale = (2 * values + MIDDLE).round().clamp(0, 15).to(torch.uint8), 0.01
        scales = values.new_full((len(values), 1), scale)
        piece = QuantizedPiece(quantized, scales, MIDDLE)
        replace(self, group=-1).put(piece, Tensor.copy_)

    def _by_group(self, numbers: Tensor) -> Tensor:
        """Expand numbers per checkpoint group to this weight's groups, and pad to whole blocks."""
        num_groups = self.weight.scales.shape[1]
        if self.group == -1:
            return numbers.expand(len(numbers), num_groups)
        if self.group > BLOCK:
            numbers = numbers.repeat_interleave(self.group // BLOCK, 1)[:, :num_groups]
        return F.pad(numbers, (0, num_groups - numbers.shape[1]))
