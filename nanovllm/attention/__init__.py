"""Choose the attention backend by name or by the device, once."""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.rows import CpuAttention
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.errors import ConfigError
from nanovllm.kernels.ops import Ops
from nanovllm.platforms.base import Platform


def create_attention(
    platform: Platform,
    ops: Ops,
    block_size: int,
    name: str,
    dtype: torch.dtype,
    product_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """`product_dtype` is what SDPA is to multiply in, if not in `dtype`."""
    if name == "sdpa":
        return SdpaAttention(block_size, product_dtype)
    if platform.name == "cuda":
        return _create_on_cuda(platform, block_size, name, dtype)
    if name != "auto":
        raise ConfigError(
            f"attention_backend={name!r} needs a CUDA device, but the engine runs on the "
            f"{platform.name}; use 'auto' or 'sdpa'"
        )
    if ops.launcher is None:
        return CpuAttention(block_size, product_dtype)
    from nanovllm.attention.cpu import NumbaAttention

    return NumbaAttention(block_size, ops.launcher, product_dtype)


def _create_on_cuda(
    platform: Platform, block_size: int, name: str, dtype: torch.dtype
) -> AttentionBackend:
    if name == "flash_attn":
        from nanovllm.attention.flash import load_flash_attention

        return load_flash_attention(platform, block_size, dtype)
    from nanovllm.attention.triton import TritonAttention

    properties = torch.cuda.get_device_properties(platform.device)
    is_hopper = properties.major == 9
    return TritonAttention(platform, properties.multi_processor_count, is_hopper)
