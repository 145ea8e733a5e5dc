"""The arguments with which layers are built (`BuildContext`) and called (`ForwardBatch`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.checkpoint.quantized.weight_format import Layouts
from nanovllm.layers.shards import ExpectedTensor
from nanovllm.ops.interface import LayerCache, LayerState, Ops, RecurrentRows
from nanovllm.ops.tp_group import ALONE, TPGroup


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The device, dtype, quantized layouts, operations and ranks that layers are built for."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    ops: Ops
    group: TPGroup = ALONE
    layouts: Layouts | None = None  # quantized layout by module name; None: all weights are dense

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        tensor = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(tensor, requires_grad=False)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens whose logits are needed; each is the last token of its row."""

    index: Tensor  # indices of these tokens in the batch
    attention: Any  # the attention backend's plan for these tokens alone


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Tokens whose embeddings do not come from the embedding layer, such as those of images."""

    index: Tensor  # indices of these tokens in the batch
    values: Tensor  # their embeddings, [index, hidden_size]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's inputs, all rows concatenated."""

    input_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], rows of the table of rotations
    slot_mapping: Tensor  # [groups, tokens], token -> position in the KV cache
    sampled: SampledTokens | None  # None: the logits of all tokens are needed
    attention: Any  # the attention backend's plan for this step
    caches: list[LayerCache | LayerState]  # one per layer
    recurrent: RecurrentRows | None = None  # set if the model has recurrent layers
    embedded: EmbeddedTokens | None = None
    rope: Tensor | None = None  # replaces the model's tables of rotations


class Layer(nn.Module):
    """A module that names its checkpoint tensors and processes its weights after loading."""

    def __call__(self, *args: Any) -> Any:
        # nn.Module checks for hooks in every call: about a millisecond for the 300 calls of a step.
        return self.forward(*args)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        """Return the checkpoint tensors of this layer's own parameters, not of its submodules."""
        return {}

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        """Lay out the loaded weights for the kernels; `allow_copy` permits a second copy."""
