"""Choose the device of each rank, and check that it exists."""

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
    """Return the device of one rank; None if only the ranks' own processes may touch a device."""
    num_ranks = config.tensor_parallel_size
    if config.distributed_executor_backend == "ray":
        if find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend='ray' needs Ray: pip install 'nanovllm[ray]'"
            )
        return None
    if num_ranks == 1 or not is_cuda(config.device):  # on the CPU, ranks share the cores
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


def take_share(config: EngineConfig, replica: int) -> None:
    """Restrict this process to its replica's GPUs, or to its share of the CPU threads.

    Must be called before the process uses a device.
    """
    num_replicas = config.data_parallel_size
    if num_replicas == 1:
        return
    # NVML counts the devices: CUDA is not initialized yet, and reads the variable when it is.
    is_local = config.distributed_executor_backend != "ray"
    if is_local and config.device != "cpu" and (num_gpus := num_devices()):
        _set_visible_devices(replica, num_replicas, config.tensor_parallel_size, num_gpus)
    if not is_cuda(config.device):
        torch.set_num_threads(max(torch.get_num_threads() // num_replicas, 1))


def _set_visible_devices(replica: int, num_replicas: int, num_ranks: int, num_gpus: int) -> None:
    """Hide the other replicas' GPUs from this process and its children."""
    if num_replicas * num_ranks > num_gpus:
        raise ConfigError(
            f"data_parallel_size={num_replicas} needs {num_replicas * num_ranks} CUDA devices "
            f"({num_ranks} per replica), but only {num_gpus} are visible; lower it, or set "
            "device='cpu'"
        )
    names = os.environ.get(VISIBLE, "").split(",")
    if names == [""]:
        names = [str(index) for index in range(num_gpus)]
    os.environ[VISIBLE] = ",".join(names[replica * num_ranks : (replica + 1) * num_ranks])
    if num_devices() != num_ranks:
        raise ConfigError(
            "GPUs cannot be hidden from a replica on this machine, because torch initializes CUDA "
            "to count them (no NVML); run one server per replica instead, each with its own "
            f"{VISIBLE}"
        )
