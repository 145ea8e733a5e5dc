"""Choose the attention backend that goes with the operations, once."""

from __future__ import annotations

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.cpu import CpuAttention
from nanovllm.kernels.base import Ops
from nanovllm.platforms.base import Platform


def create_attention(platform: Platform, ops: Ops, block_size: int) -> AttentionBackend:
    if platform.name == "cuda":
        from nanovllm.attention.triton_paged import TritonAttention

        return TritonAttention(platform)
    if ops.launcher is None:
        return CpuAttention(block_size)
    from nanovllm.attention.numba_paged import NumbaAttention

    return NumbaAttention(block_size, ops.launcher)
