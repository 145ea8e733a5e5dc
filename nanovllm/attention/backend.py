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
    """The rows of a step as host arrays; row i runs counts[i] positions, starting at starts[i]."""

    slots: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    block_table: Tensor  # int32 [slots, max_blocks] on the device; undefined past a row's blocks


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention parameters of a layer."""

    scale: float  # multiplies the scores
    # A query attends to keys less than this many positions away; None: to all.
    window: int | None = None
    softcap: float | None = None  # bounds the scaled scores: softcap * tanh(score / softcap)
    # [heads]: scores of an additional key per query head, whose value is zero
    sinks: Tensor | None = field(default=None, compare=False)
    is_causal: bool = True  # False: queries attend to later keys, too, which only SDPA supports


class AttentionBackend(Protocol):
    """An attention implementation.

    `plan` runs once per step, `attend` once per layer, after the step's k and v are cached.
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
    """Decode rows, where row i is token i, as device tensors that every graph replay reads."""

    block_table: Tensor  # as in BatchRows
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
