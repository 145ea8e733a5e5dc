"""Attention over a paged KV cache, whatever the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.ops.interface import LayerCache


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a step as host columns; row i runs counts[i] positions from starts[i]."""

    slots: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    block_table: Tensor  # [slots, max_blocks] int32 on the device; unspecified past a row's blocks

    def last_tokens(self, is_chosen: npt.NDArray[np.bool_]) -> BatchRows:
        """Return some of the rows, each with its last position alone."""
        counts = self.counts[is_chosen]
        starts = self.starts[is_chosen] + counts - 1
        return BatchRows(self.slots[is_chosen], starts, np.ones_like(counts), self.block_table)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How the queries of a layer weigh keys."""

    scale: float  # of the scores
    window: int | None = None  # how many of the newest keys a query sees, its own included


class AttentionBackend(Protocol):
    """`plan` runs once per step, `attend` once per layer, after the step's k and v are cached."""

    def plan(self, rows: BatchRows) -> Any:
        """Prepare what every layer of this step needs."""

    def attend(self, q: Tensor, cache: LayerCache, plan: Any, spec: AttentionSpec) -> Tensor:
        """Return causal attention of q [tokens, heads, head_dim] over each row's context."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which rows of one token begin with the same blocks, as device tensors."""

    groups: Tensor  # [4, groups]: a member's slot, shared keys, first place in members, members
    members: Tensor  # [rows], the rows of each group
    lens: Tensor  # [rows], the keys that a row shares with its group


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token, row i being token i, as device tensors that a graph reads anew."""

    block_table: Tensor  # as for BatchRows
    slots: Tensor
    context_lens: Tensor  # 0 is padding
    order: Tensor | None  # the rows as they should start; None: as they come
    max_context: int | None = None  # bounds the lengths; None: the table does
    shared: SharedRows | None = None


@runtime_checkable
class GraphedAttention(AttentionBackend, Protocol):
    """A backend whose decode steps a CUDA graph can repeat."""

    def decode_plan(self, rows: DecodeRows) -> Any:
        """Prepare what every layer of a graph needs."""
