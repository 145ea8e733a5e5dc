"""Choose the device of each rank, and check that it exists."""

from __future__ import annotations

from importlib.util import find_spec

from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda.memory import check_c_compiler, has_cuda, num_devices, use_device
from nanovllm.errors import ConfigError
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.device_interface import Device


def is_cuda(device: str) -> bool:
    return device != "cpu" and has_cuda()


def create_device(config: EngineConfig, group: TPGroup = ALONE) -> Device:
    """Return the device of a rank: the current GPU of this process, or the CPU."""
    if is_cuda(config.device):
        check_c_compiler()
        from nanovllm.devices.cuda.device import CudaDevice  # needs triton

        return CudaDevice(config, group)
    if config.device == "cuda":
        raise ConfigError(
            "device='cuda' needs triton and a CUDA device that torch can use; use 'auto' or 'cpu'"
        )
    return CpuDevice(config, group)


def check_device(config: EngineConfig) -> Device | None:
    """Check that the devices of all ranks exist, and return the device of one rank.

    Return None where only the rank processes may initialize their devices (several GPUs, or Ray).
    """
    num_ranks = config.tensor_parallel_size
    if config.distributed_executor_backend == "ray":
        if find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend='ray' needs Ray: pip install 'nanovllm[ray]'"
            )
        return None
    if num_ranks == 1 or not is_cuda(config.device):  # CPU ranks share the cores
        return create_device(config, TPGroup(0, num_ranks))
    if num_ranks > num_devices():
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs {num_ranks} CUDA devices, but only "
            f"{num_devices()} are visible; lower it, or set device='cpu'"
        )
    check_c_compiler()
    return None


def claim_device(device: str, rank: int) -> str:
    """Make the rank's device current in this process; return the backend for its collectives."""
    if is_cuda(device):
        use_device(rank)
        return "nccl"
    return "gloo"
