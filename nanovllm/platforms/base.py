"""Platform: everything that differs between devices, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

LinearFn = Callable[[Tensor], Tensor]
PackLinear = Callable[[Tensor, Tensor | None], LinearFn]


class Platform(Protocol):
    """Memory, copies and the device's own way to run a matrix product."""

    device: torch.device
    depth: int  # the pipeline depth that measured fastest
    name: str

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        """Resolve dtype="auto" for a checkpoint stored as `checkpoint_dtype`."""

    def cache_bytes(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may take, and log why."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes; pages are touched only when used where the device allows it."""

    def choose_linear(self, dtype: torch.dtype, num_bytes: int) -> PackLinear:
        """Pick the fastest layout and kernel for weights that take `num_bytes` in all."""
