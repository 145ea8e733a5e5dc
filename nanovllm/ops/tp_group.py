"""The ranks that share a model, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank's view of its group; a rank that is alone has nobody to talk to.

    Every rank must make the same calls, in the same order.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None  # gloo's or NCCL's, of which torch's stubs know no methods

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to split and nobody to ask."""
        return self.size == 1 and self.process_group is None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up x, which is contiguous, over the ranks, in place."""
        if self.process_group is not None:
            self.process_group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Return the x [rows, columns] of all ranks side by side."""
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.process_group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with that of rank 0."""
        if self.process_group is not None:
            self.process_group.broadcast(x, 0).wait()
        return x

    def smallest(self, number: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers."""
        if self.process_group is None:
            return number
        numbers = self.gather_columns(torch.tensor([[number]], device=device))
        return int(numbers.min())


ALONE = TPGroup()
