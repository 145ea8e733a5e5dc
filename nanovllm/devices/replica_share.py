"""Limit each data-parallel replica to its share of the machine's GPUs or CPU threads."""

from __future__ import annotations

import os

import torch

from nanovllm.config import EngineConfig
from nanovllm.devices.choose import is_cuda
from nanovllm.devices.cuda.memory import num_devices
from nanovllm.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_share(config: EngineConfig, replica: int) -> None:
    """Restrict this process to its replica's GPUs, or to its share of the CPU threads.

    Must be called before the process uses a device.
    """
    num_replicas = config.data_parallel_size
    if num_replicas == 1:
        return
    # num_devices() queries NVML, so CUDA stays uninitialized until CUDA_VISIBLE_DEVICES is set.
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
            "GPUs cannot be hidden from a replica on this machine: NVML is unavailable, so torch "
            "initializes CUDA to count them; run one server per replica instead, each with its own "
            f"{VISIBLE}"
        )
