"""What one of several engines has of a machine: GPUs of its own, or some of the CPU's threads."""

from __future__ import annotations

import os

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.platforms.cuda import num_devices
from nanovllm.platforms.ranks import is_cuda

VISIBLE = "CUDA_VISIBLE_DEVICES"


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
