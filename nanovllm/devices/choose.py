"""Choose the device of each rank, and check that there is one."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from nanovllm.config import EngineConfig
from nanovllm.devices.cpu.device import CpuDevice
from nanovllm.devices.cuda.memory import check_c_compiler, has_cuda, num_devices, use_device
from nanovllm.errors import ConfigError
from nanovllm.ops.tp_group import ALONE, TPGroup
from nanovllm.worker.device_interface import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_cuda(device: str) -> bool:
    return device != "cpu" and has_cuda()


def create_device(config: EngineConfig, group: TPGroup = ALONE) -> Device:
    """Return what a rank runs on: this process's current GPU, or its share of the CPU's memory."""
    if is_cuda(config.device):
        check_c_compiler()
        from nanovllm.devices.cuda.device import CudaDevice  # needs triton

        return CudaDevice(config, group)
    if config.device == "cuda":
        raise ConfigError(
            "device='cuda' needs a CUDA device that torch sees, and triton; use 'auto' or 'cpu'"
        )
    return CpuDevice(config, group)


def check_device(config: EngineConfig) -> Device | None:
    """Return what one rank runs on; None where only the processes of ranks may touch a device."""
    num_ranks = config.tensor_parallel_size
    if config.distributed_executor_backend == "ray":
        if find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend='ray' needs Ray: pip install 'nanovllm[ray]'"
            )
        return None
    if num_ranks == 1 or not is_cuda(config.device):  # on a CPU, ranks share the cores
        return create_device(config, TPGroup(0, num_ranks))
    if num_ranks > num_devices():
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs as many CUDA devices, and {num_devices()} "
            "can be seen; lower it, or set device='cpu'"
        )
    check_c_compiler()
    return None


def claim_device(device: str, rank: int) -> str:
    """Make this process work on the rank's own device; return the backend of its collectives."""
    if is_cuda(device):
        use_device(rank)
        return "nccl"
    return "gloo"


def take_share(config: EngineConfig, replica: int) -> None:
    """Leave the rest to the other engines; for a process that has not used a device yet."""
    num_replicas = config.data_parallel_size
    if num_replicas == 1:
        return
    # Counted by NVML: CUDA is not started yet, and reads the variable when it is.
    is_local = config.distributed_executor_backend != "ray"
    if is_local and config.device != "cpu" and (num_gpus := num_devices()):
        _show_devices(replica, num_replicas, config.tensor_parallel_size, num_gpus)
    if not is_cuda(config.device):
        torch.set_num_threads(max(torch.get_num_threads() // num_replicas, 1))


def _show_devices(replica: int, num_replicas: int, num_ranks: int, num_gpus: int) -> None:
    """Let this process and its children see the GPUs of its engine alone."""
    if num_replicas * num_ranks > num_gpus:
        raise ConfigError(
            f"data_parallel_size={num_replicas} needs {num_replicas * num_ranks} CUDA devices, "
            f"{num_ranks} for each engine, and {num_gpus} can be seen; lower it, or set "
            "device='cpu'"
        )
    names = os.environ.get(VISIBLE, "").split(",")
    if names == [""]:
        names = [str(index) for index in range(num_gpus)]
    os.environ[VISIBLE] = ",".join(names[replica * num_ranks : (replica + 1) * num_ranks])
    if num_devices() != num_ranks:
        raise ConfigError(
            "GPUs cannot be hidden from an engine here, because torch starts CUDA to count them "
            f"(no NVML); run a server for each engine instead, with its own {VISIBLE}"
        )
