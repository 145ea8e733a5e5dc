"""What runs a model on a device, chosen once: operations, attention, steps."""

from __future__ import annotations

from typing import Protocol

import torch

from nanovllm.attention import create_attention
from nanovllm.attention.base import AttentionBackend
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels import create_cpu_ops
from nanovllm.kernels.ops import Ops
from nanovllm.platforms.base import Platform
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.platforms.cuda import CudaPlatform
from nanovllm.worker.forward import EagerForward
from nanovllm.worker.input_buffers import InputBuffers
from nanovllm.worker.runner import ModelRunner, Sampler
from nanovllm.worker.samplers import TorchSampler


class Backend(Protocol):
    @property
    def ops(self) -> Ops:
        """The work between attention calls."""

    @property
    def attention(self) -> AttentionBackend:
        """Attention over the paged cache."""

    def sampler(self, buffers: InputBuffers) -> Sampler:
        """Make what draws tokens from logits."""

    def runner(self, eager: EagerForward) -> ModelRunner:
        """Make what runs steps: recorded ones where the device gains by them."""


def create_backend(
    platform: Platform,
    config: EngineConfig,
    vocab_size: int,
    dtype: torch.dtype,
    group: TPGroup,
) -> Backend:
    if isinstance(platform, CudaPlatform):
        from nanovllm.worker.cuda.backend import CudaBackend  # needs triton

        return CudaBackend(platform, config, vocab_size, dtype, group)
    assert isinstance(platform, CpuPlatform)
    return CpuBackend(platform, config, dtype, group)


class CpuBackend:
    def __init__(
        self, platform: CpuPlatform, config: EngineConfig, dtype: torch.dtype, group: TPGroup
    ) -> None:
        self.config = config
        self.group = group
        self.ops = create_cpu_ops(dtype, platform.features)
        self.attention = create_attention(
            platform,
            self.ops,
            config.kvcache_block_size,
            config.attention_backend,
            dtype,
            platform.features.product_dtype(dtype),
        )

    def sampler(self, buffers: InputBuffers) -> TorchSampler:
        return TorchSampler(buffers, self.group)

    def runner(self, eager: EagerForward) -> ModelRunner:
        config, sampler = self.config, self.sampler(eager.buffers)
        is_eager = config.enforce_eager or config.attention_backend != "auto"
        # A recording holds kernels alone, and a group's sums stand between them.
        if self.ops.launcher is None or is_eager or not self.group.is_alone:
            return ModelRunner(eager.buffers, eager, sampler)
        from nanovllm.kernels.cpu.ops import NumbaOps  # needs numba
        from nanovllm.worker.recorded_forward import RecordedForward

        assert isinstance(self.ops, NumbaOps)
        recorded = RecordedForward(eager, self.ops, config.max_model_len)
        recorded.prepare()
        return ModelRunner(eager.buffers, recorded, sampler)
