"""Choose the device of a rank."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda.memory import check_c_compiler, has_cuda
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
