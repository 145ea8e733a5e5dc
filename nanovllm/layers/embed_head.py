"""Token embedding and LM head, which may share one weight; ranks split the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels.ops import Hidden
from nanovllm.kernels.quantized_weight import Weight
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.shards import ExpectedTensor, split, whole
from nanovllm.layers.weights import create_weight


class Embedding(Layer):
    table: Weight  # once it is loaded

    def __init__(self, num_embeddings: int, dim: int, scale: float, build: Build) -> None:
        super().__init__()
        self.vocab = split(num_embeddings, build.group)
        self.weight = create_weight({"": [self.vocab]}, whole(dim), build)
        self.scale = torch.tensor(scale).to(build.dtype).item()  # rounded, as it was in training
        self.ops, self.group = build.ops, build.group

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.is_alone:
            return self.ops.embed(token_ids, self.table, self.scale)
        rows = token_ids - self.vocab.first
        is_elsewhere = (rows < 0) | (rows >= self.vocab.count)
        x = self.ops.embed(rows.masked_fill(is_elsewhere, 0), self.table, self.scale)
        return self.group.all_reduce(x.masked_fill_(is_elsewhere[:, None], 0.0))

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return self.weight.expected_tensors(path)

    def pack(self, has_room: bool) -> None:
        self.table = self.weight.for_ops()


class LMHead(MergedLinear):
    """Projects hidden states to logits; `tied` makes it use the embedding's weight."""

    def __init__(self, dim: int, vocab_size: int, build: Build, tied: Embedding | None) -> None:
        outputs = {"lm_head": [split(vocab_size, build.group)]}
        super().__init__(whole(dim), outputs, False, build)
        self.vocab_size, self.group = vocab_size, build.group
        self.is_tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    def logits(self, hidden: Hidden, norm: RMSNorm) -> Tensor:
        """Project the norm of hidden to the logits of the whole vocabulary, without padding."""
        shard, _ = self.after_norm(hidden, norm)
        logits = self.group.gather_columns(shard)
        is_padded = logits.shape[1] > self.vocab_size
        return logits[:, : self.vocab_size].contiguous() if is_padded else logits

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return {} if self.is_tied else super().expected_tensors(path)

    def tied_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        """What a checkpoint may hold as well as the embedding: a copy of it."""
        return self.weight.expected_copy(f"{path}.weight") if self.is_tied else {}
