"""What every layer needs at construction, and the batch it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.layers.layer_weight import Layouts
from nanovllm.layers.shards import ExpectedTensor
from nanovllm.ops.interface import LayerCache, Ops
from nanovllm.ops.tp_group import ALONE, TPGroup


@dataclass(frozen=True, slots=True)
class Build:
    """Device, dtype and layouts of parameters, their operations and the ranks that share them."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    ops: Ops
    group: TPGroup = ALONE
    layouts: Layouts | None = None  # of quantized weights; None: all are dense

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        tensor = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(tensor, requires_grad=False)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens whose logits are wanted: each the last one of its row."""

    index: Tensor  # into the batch
    attention: Any  # the attention backend's plan for them alone


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's inputs, all rows concatenated."""

    input_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens], where each one's key and value go, counted in tokens
    sampled: SampledTokens | None  # None: all of them
    attention: Any  # the attention backend's plan for this step
    caches: list[LayerCache]


class Layer(nn.Module):
    """A module that is loaded, then packed, then called."""

    def __call__(self, *args: Any) -> Any:
        # nn.Module looks for hooks in every call; with some 300 calls a step that is a millisecond.
        return self.forward(*args)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        """Name the checkpoint's tensors that fill this layer's own parameters, not its modules'."""
        return {}

    def pack(self, has_room: bool) -> None:
        """Lay the loaded parameters out as they run; `has_room` allows a second copy of them."""
