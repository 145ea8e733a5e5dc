"""Platform: everything that differs between devices, chosen once at start."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Platform(Protocol):
    """Memory and what to do with it."""

    device: torch.device
    depth: int  # the pipeline depth that measured fastest
    name: str

    def choose_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        """Resolve dtype="auto" for a checkpoint stored as `checkpoint_dtype`."""

    def cache_bytes(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes the KV cache may take, and log why."""

    def allocate_cache(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes; pages are touched only when used where the device allows it."""

    def has_room_for_copy(self, num_bytes: int) -> bool:
        """Whether weights of `num_bytes` may be kept in two layouts."""
