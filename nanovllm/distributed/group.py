"""The ranks that share a model, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.store import HOST


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


def connect(
    rank: int,
    size: int,
    store: dist.Store,
    backend: str,
    timeout: timedelta,
    address: str = HOST,  # of this machine, where other ranks reach it
) -> TPGroup:
    """Join the group that meets at a store; nothing of it is global to the process."""
    kinds: Any = dist  # torch's stubs know only some of what follows
    if backend == "nccl":
        nccl = kinds.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return TPGroup(rank, size, nccl(store, rank, size, options))
    gloo = kinds.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]  # by itself it might choose a network
    return TPGroup(rank, size, gloo(store, rank, size, options))
