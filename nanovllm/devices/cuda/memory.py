"""Detect the GPUs, and compute how much of their memory the KV cache may use."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace

import torch

from nanovllm.errors import ConfigError

GIB = 1 << 30


def has_cuda() -> bool:
    """Whether there is an NVIDIA GPU and Triton is installed."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and importlib.util.find_spec("triton") is not None


def check_c_compiler() -> None:
    """Raise ConfigError if Triton has no C compiler to build its kernel launchers."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"a GPU needs a C compiler for Triton, but {' or '.join(compilers)} is not "
            "on the path; install gcc (apt-get install gcc libc6-dev), set CC, or set device='cpu'"
        )


def num_devices() -> int:
    return torch.cuda.device_count()


def use_device(index: int) -> None:
    """Make a GPU current; devices created later use it."""
    torch.cuda.set_device(index)


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """How a device's memory is used, in bytes, and how much remains for the KV cache."""

    total: int
    utilization: float
    held: int  # used by weights and other processes
    step: int  # used by the activations of the largest step
    graphs: int  # used by CUDA graphs

    @property
    def room(self) -> int:
        return int(self.total * self.utilization) - self.held - self.step - self.graphs

    def grant(self, wanted: int) -> int:
        """Return as many of the `wanted` bytes as are available; raise ConfigError if none are."""
        if self.room <= 0:
            raise ConfigError(
                f"no GPU memory is left for the KV cache: {self}; raise "
                "gpu_memory_utilization, stop other processes, or lower max_num_batched_tokens"
            )
        return min(wanted, self.room)

    def check(self, num_bytes: int) -> None:
        """Raise ConfigError if an explicit `num_kvcache_blocks` exceeds the device's memory.

        `gpu_memory_utilization` has no effect here.
        """
        whole = replace(self, utilization=1.0)
        if num_bytes > whole.room:
            raise ConfigError(
                f"num_kvcache_blocks asks for {num_bytes / GIB:.2f} GiB, but "
                f"{max(whole.room, 0) / GIB:.2f} are left: {whole}; lower num_kvcache_blocks or "
                "max_num_batched_tokens, or stop other processes"
            )

    def __str__(self) -> str:
        share = ""
        if self.utilization < 1:
            budget = self.total * self.utilization / GIB
            share = f" x gpu_memory_utilization {self.utilization} = {budget:.1f}"
        return (
            f"{self.total / GIB:.1f} GiB{share}, of which weights and other processes hold "
            f"{self.held / GIB:.1f}, a step needs {self.step / GIB:.1f}, "
            f"graphs {self.graphs / GIB:.1f}"
        )
