"""Choose the platform by name, once."""

from __future__ import annotations

from nanovllm.errors import ConfigError
from nanovllm.platforms.base import Platform
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.platforms.cuda import CudaPlatform, check_c_compiler, has_cuda


def create_platform(
    device: str, gpu_memory_utilization: float = 0.9, num_ranks: int = 1
) -> Platform:
    """Return what a rank runs on: this process's current GPU, or its share of the CPU's memory."""
    if device != "cpu" and has_cuda():
        check_c_compiler()
        return CudaPlatform(gpu_memory_utilization)
    if device == "cuda":
        raise ConfigError(
            "device='cuda' needs a CUDA device that torch sees, and triton; use 'auto' or 'cpu'"
        )
    return CpuPlatform(num_ranks)
