"""Token embedding and LM head, which may share one weight."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear


class Embedding(Layer):
    def __init__(self, num_embeddings: int, dim: int, scale: float, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(num_embeddings, dim)
        self.scale = torch.tensor(scale).to(build.dtype).item()  # rounded, as it was in training
        self.ops = build.ops

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ops.embed(token_ids, self.weight, self.scale)

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        return {f"{path}.weight": self.weight}


class LMHead(Linear):
    """Projects hidden states to logits; `tied` makes it use the embedding's weight."""

    def __init__(self, dim: int, vocab_size: int, build: Build, tied: Embedding | None) -> None:
        super().__init__(dim, vocab_size, False, build, "lm_head")
        self.is_tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    def weight_slots(self, path: str) -> dict[str, Tensor]:
        return {} if self.is_tied else super().weight_slots(path)
