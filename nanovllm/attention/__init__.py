"""Choose the attention backend for a platform, once."""

from __future__ import annotations

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.cpu import CpuAttention
from nanovllm.platforms.base import Platform


def create_attention(platform: Platform, block_size: int) -> AttentionBackend:
    assert platform.name == "cpu"
    return CpuAttention(block_size)
