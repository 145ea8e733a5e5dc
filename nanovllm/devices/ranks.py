"""The devices of tensor-parallel ranks: check that each rank has one, and claim it."""

from __future__ import annotations

from importlib.util import find_spec

from nanovllm.config import EngineConfig
from nanovllm.devices import choose
from nanovllm.devices.cuda.memory import check_c_compiler, num_devices, use_device
from nanovllm.errors import ConfigError
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.device_interface import Device


def check_devices(config: EngineConfig) -> Device | None:
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
    if not choose.is_cuda(config.device):  # CPU ranks share the cores
        return choose.create_device(config, TPGroup(0, num_ranks))
    if num_ranks > num_devices():
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs {num_ranks} CUDA devices, but only "
            f"{num_devices()} are visible; lower it, or set device='cpu'"
        )
    check_c_compiler()
    return None


def claim_device(device: str, rank: int) -> str:
    """Make the rank's device current in this process; return the backend for its collectives."""
    if choose.is_cuda(device):
        use_device(rank)
        return "nccl"
    return "gloo"
