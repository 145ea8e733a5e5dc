"""The tensor-parallel group: the ranks that share a model, and their collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank's view of its group.

    Every rank must make the same calls, in the same order.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None  # gloo or NCCL; torch's stubs lack its methods

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one, so nothing is sharded or communicated."""
        return self.size == 1 and self.process_group is None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x, which must be contiguous, over the ranks in place."""
        if self.process_group is not None:
            self.process_group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate x [rows, columns] of all ranks along the columns."""
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.process_group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with the x of rank 0."""
        if self.process_group is not None:
            self.process_group.broadcast(x, 0).wait()
        return x

    def smallest(self, number: int, device: torch.device) -> int:
        """Return the minimum of `number` over the ranks."""
        if self.process_group is None:
            return number
        numbers = self.gather_columns(torch.tensor([[number]], device=device))
        return int(numbers.min())


ALONE = TPGroup()
