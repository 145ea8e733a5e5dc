"""Let the tests of several processes share one GPU: each process sees only its own memory."""

from __future__ import annotations

import os
import subprocess

import torch


def versions() -> str:
    """Return the versions of torch and Triton, and whether the persistent step can be used."""
    import triton

    from nanovllm.devices.cuda.persistent import TRITON

    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, Triton {triton.__version__}, no GPU"
    is_on = torch.cuda.get_device_capability() == (9, 0) and triton.__version__.startswith(TRITON)
    state = "on" if is_on else "off"
    about = f"torch {torch.__version__}, Triton {triton.__version__}, persistent step {state}"
    return f"{torch.cuda.get_device_name()}: {about}"


def share_gpu(num_cores: int) -> None:
    """Make this process believe that it is alone on the GPU, on a machine with `num_cores`."""
    torch.cuda.mem_get_info = own_mem_get_info
    os.cpu_count = lambda: num_cores  # each engine may start that many compiler processes


def own_mem_get_info(device: object = None) -> tuple[int, int]:
    """Return what `torch.cuda.mem_get_info` would if no other process used the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    return total - torch.cuda.memory_reserved(), total


def process_bytes() -> int:
    """Return the device memory of this process, including that of the driver and the graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    table = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    used = dict(line.split(", ") for line in table.splitlines())
    return int(used[str(os.getpid())]) << 20
