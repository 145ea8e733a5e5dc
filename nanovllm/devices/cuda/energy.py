"""Read how much energy GPUs have used, from NVML, the library of NVIDIA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def energy_counter(num_devices: int) -> Callable[[], float] | None:
    """Return a function that reads the joules used so far by the first GPUs together.

    Returns None if NVML is missing or does not count the energy of these GPUs.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    handles = []
    for index in range(num_devices):
        handle = ctypes.c_void_p()
        # By UUID, because NVML also numbers the GPUs that CUDA_VISIBLE_DEVICES hides.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
            return None
        handles.append(handle)

    def joules() -> float:
        total = 0
        for handle in handles:
            millijoules = ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
                return float("nan")
            total += millijoules.value
        return total / 1000

    return joules if joules() == joules() else None
