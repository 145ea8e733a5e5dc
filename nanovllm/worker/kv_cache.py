"""The layout of the KV cache, which only this file knows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import LayerCache


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Keys and values of one layer are each [num_blocks, block_size, kv_heads, head_dim].

    Of eight bits they have an exponent for each token and head, behind those of all layers.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        num_rows = 2 * self.num_layers * self.block_size * self.num_kv_heads
        return num_rows * (self.head_dim * self.dtype.itemsize + self.has_exponents)

    @property
    def has_exponents(self) -> bool:
        return self.dtype == FP8

    def views(self, buffer: Tensor, num_blocks: int) -> list[LayerCache]:
        """Cut a byte buffer of num_blocks * block_bytes into per-layer caches."""
        shape = (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads)
        num_bytes = math.prod(shape) * self.head_dim * self.dtype.itemsize
        rows = buffer[:num_bytes].view(self.dtype).view(*shape, self.head_dim)
        if not self.has_exponents:
            return [LayerCache(*layer) for layer in rows]
        exponents = buffer[num_bytes:].view(*shape[:3], *shape[:2:-1])
        return [LayerCache(*layer, *each) for layer, each in zip(rows, exponents, strict=True)]
