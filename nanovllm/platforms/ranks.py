"""Which device each of the ranks that share a model works on."""

from __future__ import annotations

from nanovllm.errors import ConfigError
from nanovllm.platforms.cuda import has_cuda, num_devices, use_device


def is_cuda(device: str) -> bool:
    return device != "cpu" and has_cuda()


def check_num_ranks(device: str, num_ranks: int) -> None:
    """Refuse more ranks than there are GPUs; on a CPU they share the cores."""
    if is_cuda(device) and num_ranks > num_devices():
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs as many CUDA devices, and {num_devices()} "
            "can be seen; lower it, or set device='cpu'"
        )


def claim_device(device: str, rank: int) -> str:
    """Make this process work on the rank's own device; return the backend of its collectives."""
    if is_cuda(device):
        use_device(rank)
        return "nccl"
    return "gloo"
