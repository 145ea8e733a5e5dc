"""Platform: everything that differs between devices, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.pending import Pending


@dataclass(frozen=True, slots=True)
class Memory:
    free: int  # bytes
    total: int


class Platform(Protocol):
    """Memory and copies."""

    device: torch.device
    depth: int  # the pipeline depth that measured fastest
    name: str  # "cpu" or "cuda"
    device_name: str  # what its maker calls it

    def in_order(self) -> AbstractContextManager[object]:
        """Queue all work of this context behind what was queued in such a context before."""

    def check_fp8(self, head_dim: int) -> None:
        """Refuse a KV cache of eight bits where no kernel reads one."""

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        """Resolve dtype="auto" for a checkpoint stored as `checkpoint_dtype`."""

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        """Whether kernels read weights as GGUF stores them, for activations of `dtype`."""

    def reads_codes(self, kind: str, dtype: torch.dtype) -> bool:
        """Whether kernels read codes of quantised safetensors, for activations of `dtype`."""

    def memory(self) -> Memory:
        """Return what one rank has of the device's memory."""

    def profile(self, run: Callable[[], object]) -> None:
        """Run the largest step there can be, if that is how the platform learns what steps need."""

    def cache_bytes(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may take, and log why."""

    def check_cache_bytes(self, num_bytes: int) -> None:
        """Raise ConfigError if a KV cache of the size that the user asked for cannot fit."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes; pages are touched only when used where the device allows it."""

    def has_room_for_copy(self, num_bytes: int) -> bool:
        """Whether weights of `num_bytes` may be kept in two layouts."""

    def fill(self, target: Tensor, rows: Tensor) -> None:
        """Copy some rows of a stored weight and wait for them; any thread may call this."""

    def upload(self, array: np.ndarray) -> Tensor:
        """Return the array on the device, without waiting; it must not change afterwards."""

    def host_memory(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Return memory of the host that `readable` need not copy."""

    def is_readable(self, array: np.ndarray) -> bool:
        """Whether it is such memory."""

    def readable(self, array: np.ndarray) -> Tensor:
        """Return the array where kernels can read it; it must not change until they have."""

    def fetch(self, *tensors: Tensor) -> Pending[list[np.ndarray]]:
        """Start the way of some tensors to the host."""

    def release(self) -> None:
        """Return memory to the device that nothing refers to any more."""
