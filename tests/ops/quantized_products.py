"""Quantize weights, and multiply them by activations quantized to FP8, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.fp8 import Fp8Tensor, quantize_fp8, quantize_rows
from nanovllm.ops.quantized_weight import BLOCK, MIDDLE, QuantizedWeight, pack_words


def quantize_activations(x: Tensor, by_block: bool = False) -> Fp8Tensor:
    """Quantize the rows of x to FP8, with one scale per row or per 128 inputs."""
    if not by_block:
        return quantize_rows(x.float())
    num_in = x.shape[1]
    parts = F.pad(x.float(), (0, -num_in % BLOCK)).view(-1, BLOCK)
    quantized = quantize_rows(parts)
    values = quantized.values.view(len(x), -1)[:, :num_in].contiguous()
    return Fp8Tensor(values, quantized.scales.view(len(x), -1))


def quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Quantize x like the FP8 weight, and multiply the dequantized values."""
    rows = quantize_activations(x, weight.has_blocks)
    quantized = QuantizedWeight(8, pack_words(rows.values), rows.scales, None, x.shape[1])
    y = F.linear(quantized.dequantize(torch.float32), weight.dequantize(torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize_blocks(values: Tensor) -> Fp8Tensor:
    """Quantize to FP8 in blocks of 128 x 128; scales are repeated for each row."""
    num_rows, num_in = values.shape
    padded = F.pad(values.float(), (0, -num_in % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    quantized = quantize_fp8(blocks, blocks.abs().amax((1, 3), keepdim=True))
    scales = quantized.scales[:, 0, :, 0].repeat_interleave(BLOCK, 0)[:num_rows]
    return Fp8Tensor(quantized.values.view_as(padded)[:num_rows, :num_in], scales)


def quantize_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return integers [outputs, inputs] around MIDDLE, and scales [outputs, groups]."""
    num_in = values.shape[1]
    parts = F.pad(values.float(), (0, -num_in % group)).view(len(values), -1, group)
    scales = parts.abs().amax(2).clamp_(min=1e-6) / (MIDDLE - 1)
    quantized = (parts / scales.unsqueeze(2)).round_().add_(MIDDLE).clamp_(0, 15)
    return quantized.flatten(1)[:, :num_in].to(torch.uint8), scales
