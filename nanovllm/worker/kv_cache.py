"""The KV cache of a model: what its blocks hold, and how many fit."""

from __future__ import annotations

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.devices.base import Device
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.fp8 import FP8
from nanovllm.kernels.kv_layout import KVCacheSpec
from nanovllm.layers.shards import split_kv_heads


def kv_cache_spec(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, group: TPGroup
) -> KVCacheSpec:
    num_kv_heads = split_kv_heads(model.num_kv_heads, group).count
    return KVCacheSpec(
        *(model.num_layers, config.kvcache_block_size, num_kv_heads, model.head_dim),
        dtype if config.kv_cache_dtype == "auto" else FP8,
    )


def choose_num_blocks(config: EngineConfig, spec: KVCacheSpec, device: Device) -> int:
    """As many as the user says, or as all sequences at full length could use, or as fit."""
    if config.num_kvcache_blocks != -1:
        device.check_cache_bytes(config.num_kvcache_blocks * spec.block_bytes)
        return config.num_kvcache_blocks
    blocks_per_seq = -(-config.max_model_len // config.kvcache_block_size)
    wanted = config.max_num_seqs * blocks_per_seq * spec.block_bytes
    num_blocks = device.cache_bytes(wanted) // spec.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"no room for a KV cache: one block of {config.kvcache_block_size} tokens takes "
            f"{spec.block_bytes:,} bytes; free memory, or use a smaller kvcache_block_size"
        )
    return num_blocks
