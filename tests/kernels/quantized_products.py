"""Products whose activations are quantized to FP8 as well, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fp8 import ScaledCodes, round_rows
from nanovllm.kernels.quantized_weight import BLOCK, QuantizedWeight, pack_words


def quantize_rows(x: Tensor, by_block: bool = False) -> ScaledCodes:
    """Quantize the rows of x to FP8 by their largest numbers, or those of every 128 inputs."""
    if not by_block:
        return round_rows(x.float())
    num_in = x.shape[1]
    parts = F.pad(x.float(), (0, -num_in % BLOCK)).view(-1, BLOCK)
    rounded = round_rows(parts)
    codes = rounded.codes.view(len(x), -1)[:, :num_in].contiguous()
    return ScaledCodes(codes, rounded.scales.view(len(x), -1))


def quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Quantize both sides to FP8, and multiply what they stand for."""
    rows = quantize_rows(x, weight.has_blocks)
    quantized = QuantizedWeight(8, pack_words(rows.codes), rows.scales, None, x.shape[1])
    y = F.linear(quantized.dequantize(torch.float32), weight.dequantize(torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
