"""Projections, token embedding and LM head; ranks share their outputs, inputs or vocabulary.

A projection has one weight, or several of the checkpoint's stacked so that one product serves all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.layer_weight import LayerWeight, Outputs
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.shards import (
    ExpectedTensor,
    Shard,
    expect_stack,
    num_outputs,
    split,
    whole,
)
from nanovllm.ops.interface import Activation, PackedLinear, ResidualStream
from nanovllm.ops.quantized_weight import Weight


class MergedLinear(Layer):
    """Projects to several outputs at once, such as q, k and v, or gate and up.

    One with an activation returns activation(gate) * up.
    """

    packed: PackedLinear  # once it is loaded

    def __init__(
        self,
        inputs: Shard,
        outputs: Outputs,
        bias: bool,
        build: Build,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        self.weight = LayerWeight(outputs, inputs, build)
        self.bias = build.parameter(num_outputs(outputs)) if bias else None
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def after_norm(self, hidden: ResidualStream, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Project the norm of hidden; return also the residual, to which its update is added."""
        return self.packed.after_norm(hidden, norm.weights)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        parent = path[: path.rfind(".") + 1]
        tensors = self.weight.expected_tensors(parent)
        if self.bias is not None:
            biases = expect_stack(self.bias, self.outputs)
            tensors |= {f"{parent}{name}.bias": tensor for name, tensor in biases.items()}
        return tensors

    def pack(self, has_room: bool) -> None:
        weight = self.weight.for_ops()
        self.packed = self.ops.pack_linear(weight, self.bias, self.activation, has_room)
        del self.weight


class RowParallelLinear(MergedLinear):
    """A projection of what is spread over the ranks; their results are added up."""

    def __init__(
        self, inputs: Shard, out_features: int, bias: bool, build: Build, name: str
    ) -> None:
        super().__init__(inputs, {name: [whole(out_features)]}, bias, build)
        self.group = build.group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.packed(x))

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        """Project x, for the next norm to add it to the residual."""
        if self.group.is_alone:
            return self.packed.add_to(residual, x)
        return ResidualStream(residual, self(x))  # every rank has the residual: their sum must not

    def pack(self, has_room: bool) -> None:
        if self.group.rank > 0:
            self.bias = None  # rank 0 adds it
        super().pack(has_room)


class Embedding(Layer):
    table: Weight  # once it is loaded

    def __init__(self, num_embeddings: int, dim: int, scale: float, build: Build) -> None:
        super().__init__()
        self.vocab = split(num_embeddings, build.group)
        self.weight = LayerWeight({"": [self.vocab]}, whole(dim), build)
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

    def logits(self, hidden: ResidualStream, norm: RMSNorm) -> Tensor:
        """Project the norm of hidden to the logits of the whole vocabulary, without padding."""
        shard, _ = self.after_norm(hidden, norm)
        logits = self.group.gather_columns(shard)
        is_padded = logits.shape[1] > self.vocab_size
        return logits[:, : self.vocab_size].contiguous() if is_padded else logits

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return {} if self.is_tied else super().expected_tensors(path)
