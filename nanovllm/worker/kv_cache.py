"""The size and layout of the KV cache, defined only here."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.layers.shards import split_kv_heads
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV cache: k and v of a layer are [num_blocks, block_size, kv_heads, head_dim].

    An FP8 cache also has an exponent for k and one for v, per token and head. The exponents of all
    layers are stored after the keys and values of all layers.
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
        """Split a byte buffer of num_blocks * block_bytes into per-layer caches."""
        shape = (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads)
        num_bytes = math.prod(shape) * self.head_dim * self.dtype.itemsize
        rows = buffer[:num_bytes].view(self.dtype).view(*shape, self.head_dim)
        if not self.has_exponents:
            return [LayerCache(*layer) for layer in rows]
        exponents = buffer[num_bytes:].view(*shape[:3], *shape[:2:-1])
        return [LayerCache(*layer, *each) for layer, each in zip(rows, exponents, strict=True)]


def kv_cache_spec(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, group: TPGroup
) -> KVCacheSpec:
    num_kv_heads = split_kv_heads(model.num_kv_heads, group).count
    num_layers = len(model.layers)
    if model.recurrent is not None:
        num_layers -= len(model.recurrent.layers)
    if config.kv_cache_dtype != "auto":
        dtype = FP8
    return KVCacheSpec(num_layers, config.kvcache_block_size, num_kv_heads, model.head_dim, dtype)


def agree(number: int, device: Device) -> int:
    """Return the minimum of a number of blocks or states over all ranks."""
    smallest = device.group.smallest(number, device.torch_device)
    if smallest < number:
        text = "%d instead of %d, because another rank has less memory"
        logger.info(f"KV-cache blocks or states: {text}", smallest, number)
    return smallest
