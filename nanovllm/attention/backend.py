"""The interface of attention over a paged KV cache, for every device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.ops.interface import LayerCache


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a step; row i has counts[i] tokens from position starts[i] on."""

    slots: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    # int32 [slots, groups, max_blocks] on the device; entries past a row's blocks, and before its
    # window, are undefined.
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention parameters of a layer."""

    scale: float  # multiplies the scores
    # A query attends to keys fewer than this many positions away; None: to all keys.
    window: int | None = None
    softcap: float | None = None  # bounds the scaled scores: softcap * tanh(score / softcap)
    # [heads]: each head's attention sink, the score of an additional key whose value is zero
    sinks: Tensor | None = field(default=None, compare=False)
    is_causal: bool = True  # False: queries also attend to later keys; only SDPA supports this


class AttentionBackend(Protocol):
    """An attention implementation.

    `plan` runs once per step, `attend` once per layer, after that layer's k and v are cached.
    """

    def plan(self, rows: BatchRows) -> Any:
        """Prepare the metadata that all layers of this step share."""

    def attend(self, q: Tensor, cache: LayerCache, plan: Any, spec: AttentionSpec) -> Tensor:
        """Return the attention of q [tokens, heads, head_dim] over each row's context."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Groups of decode rows that share their first blocks, for cascade attention, on the device."""

    # [4, groups]: slot of one member, number of shared keys, offset into members, member count
    groups: Tensor
    members: Tensor  # [rows], row indices, group by group
    lens: Tensor  # [rows], number of keys that a row shares with its group


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows as device tensors, which every graph replay reads; row i is token i."""

    block_tables: Tensor  # as in BatchRows
    slots: Tensor
    context_lens: Tensor  # 0: padding
    order: Tensor | None  # row indices in the order in which the kernel runs them; None: 0, 1, ...
    max_context: int | None = None  # upper bound of context_lens; None: the block table's width
    shared: SharedRows | None = None


@runtime_checkable
class GraphedAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in a CUDA graph."""

    def decode_plan(self, rows: DecodeRows) -> Any:
        """Prepare the metadata that all layers of a graph share."""
