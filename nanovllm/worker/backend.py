"""What runs a model on a device, chosen once: operations, attention, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm.attention import create_attention
from nanovllm.attention.base import AttentionBackend
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.distributed.group import ALONE, TPGroup
from nanovllm.kernels.ops import Ops
from nanovllm.platforms import create_platform
from nanovllm.platforms.base import Platform
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.runner import ModelRunner, Sampler
from nanovllm.worker.tables import SlotTables


class Backend(Protocol):
    """One rank's device, and the ways to work on it."""

    @property
    def platform(self) -> Platform: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""

    @property
    def group(self) -> TPGroup:
        """The ranks that share the model."""

    @property
    def ops(self) -> Ops:
        """The work between attention calls."""

    @property
    def attention(self) -> AttentionBackend:
        """Attention over the paged cache."""

    def sampler(self, tables: SlotTables) -> Sampler:
        """Make what draws tokens from logits."""

    def compile_ahead(self, largest_step: Callable[[], EagerForward]) -> None:
        """Compile the kernels of every step at once, if that takes long and is not done yet."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Make what runs steps: recorded ones where the device gains by them."""


def create_backend(config: EngineConfig, model: ModelConfig, group: TPGroup = ALONE) -> Backend:
    platform = create_platform(config.device, config.gpu_memory_utilization, group.size)
    dtype = choose_dtype(config.dtype, model.dtype, platform)
    block_size, name = config.kvcache_block_size, config.attention_backend
    if isinstance(platform, CudaPlatform):
        from nanovllm.kernels.cuda.ops import TritonOps  # needs triton
        from nanovllm.worker.cuda.backend import CudaBackend

        ops = TritonOps()
        attention = create_attention(platform, ops, block_size, name, dtype)
        return CudaBackend(platform, dtype, group, ops, attention, config, model)
    from nanovllm.worker.cpu.backend import create_cpu_backend

    assert isinstance(platform, CpuPlatform)
    return create_cpu_backend(platform, dtype, group, config)


def choose_dtype(asked: str, checkpoint_dtype: str, platform: Platform) -> torch.dtype:
    if asked == "auto":
        return platform.choose_dtype(checkpoint_dtype)
    dtype: torch.dtype = getattr(torch, asked)
    return dtype
