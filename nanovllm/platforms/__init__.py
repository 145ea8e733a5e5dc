"""Choose the platform by name, once."""

from __future__ import annotations

from nanovllm.errors import ConfigError
from nanovllm.platforms.base import Platform
from nanovllm.platforms.cpu import CpuPlatform
from nanovllm.platforms.cuda import CudaPlatform, has_cuda, num_devices, use_device


def create_platform(
    device: str, gpu_memory_utilization: float = 0.9, num_ranks: int = 1
) -> Platform:
    """Return what a rank runs on: this process's current GPU, or its share of the CPU's memory."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device != "cpu" and has_cuda():
        return CudaPlatform(gpu_memory_utilization)
    if device == "cuda":
        raise ConfigError(
            "device='cuda' needs a CUDA device that torch sees, and triton; use 'auto' or 'cpu'"
        )
    return CpuPlatform(num_ranks)


def check_num_ranks(device: str, num_ranks: int) -> None:
    """Refuse more ranks than there are GPUs; on a CPU they share the cores."""
    if device != "cpu" and has_cuda() and num_ranks > num_devices():
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs as many CUDA devices, and {num_devices()} "
            "can be seen; lower it, or set device='cpu'"
        )


def claim_device(device: str, rank: int) -> str:
    """Make this process work on the rank's own device; return the backend of its collectives."""
    if device != "cpu" and has_cuda():
        use_device(rank)
        return "nccl"
    return "gloo"
