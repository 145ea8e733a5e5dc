"""Projections, token embedding and LM head, sharded by outputs, inputs or vocabulary.

A projection has one weight, which may stack several checkpoint weights into a single GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.layer_weight import LayerWeight
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.shards import (
    ExpectedTensor,
    Outputs,
    Shard,
    expect_stack,
    num_outputs,
    replicated,
    sharded,
)
from nanovllm.ops.interface import Activation, PackedLinear, ResidualStream
from nanovllm.ops.quantized_weight import Weight


class MergedLinear(Layer):
    """A projection that may merge several of the checkpoint's, e.g. q, k and v, or gate and up.

    With an activation, it returns activation(gate) * up. `row_order` permutes the outputs: output i
    is row `row_order[i]` of the checkpoint's weights, concatenated.
    """

    packed: PackedLinear  # set by `process_weights_after_loading`

    def __init__(
        self,
        inputs: Shard,
        outputs: Outputs,
        bias: bool,
        build: BuildContext,
        activation: Activation | None = None,
        row_order: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        self.row_order = row_order
        self.weight = LayerWeight(outputs, inputs, build)
        self.bias = build.parameter(num_outputs(outputs)) if bias else None
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def after_norm(self, hidden: ResidualStream, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return the projection of norm(residual + update), and the new residual."""
        if norm is None:
            assert hidden.update is None, "only a norm adds updates"
            return self.packed(hidden.residual), hidden.residual
        return self.packed.after_norm(hidden, norm.weights)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        parent = path[: path.rfind(".") + 1]
        tensors = self.weight.expected_tensors(parent)
        if self.bias is not None:
            biases = expect_stack(self.bias, self.outputs)
            tensors |= {f"{parent}{name}.bias": tensor for name, tensor in biases.items()}
        return tensors

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        if self.row_order is not None:
            self.weight.reorder(torch.tensor(self.row_order))
            if self.bias is not None:
                self.bias.data = self.bias.data[self.row_order]
        self.packed = self._pack(self.weight.for_ops(), allow_copy)
        del self.weight

    def _pack(self, weight: Weight, allow_copy: bool) -> PackedLinear:
        return self.ops.pack_linear(weight, self.bias, self.activation, allow_copy)


class RowParallelLinear(MergedLinear):
    """A projection whose inputs are sharded; the ranks' outputs are summed."""

    def __init__(
        self, inputs: Shard, out_features: int, bias: bool, build: BuildContext, name: str
    ) -> None:
        super().__init__(inputs, {name: [replicated(out_features)]}, bias, build)
        self.group = build.group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.packed(x))

    def add_to(self, residual: Tensor, x: Tensor) -> ResidualStream:
        """Project x; return the result as an update, or add it to the residual in place."""
        if self.group.is_alone:
            return self.packed.add_to(residual, x)
        # Every rank has the whole residual, so only the update is summed over the ranks.
        return ResidualStream(residual, self(x))

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        if self.group.rank > 0:
            self.bias = None  # only rank 0 adds the bias: the ranks' outputs are summed
        super().process_weights_after_loading(allow_copy)


class Embedding(Layer):
    table: Weight  # set by `process_weights_after_loading`

    def __init__(self, num_embeddings: int, dim: int, scale: float, build: BuildContext) -> None:
        super().__init__()
        self.vocab = sharded(num_embeddings, build.group)
        self.weight = LayerWeight({"": [self.vocab]}, replicated(dim), build)
        self.scale, self.ops, self.group = scale, build.ops, build.group

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.is_alone:
            return self.ops.embed(token_ids, self.table, self.scale)
        rows = token_ids - self.vocab.first
        is_elsewhere = (rows < 0) | (rows >= self.vocab.count)
        x = self.ops.embed(rows.masked_fill(is_elsewhere, 0), self.table, self.scale)
        return self.group.all_reduce(x.masked_fill_(is_elsewhere[:, None], 0.0))

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return self.weight.expected_tensors(path)

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        self.table = self.weight.for_ops()


class LMHead(MergedLinear):
    """The projection of hidden states to logits; with `tied`, it uses the embedding's weight."""

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        build: BuildContext,
        tied: Embedding | None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        outputs = {"lm_head": [sharded(vocab_size, build.group)]}
        super().__init__(replicated(dim), outputs, False, build)
        self.vocab_size, self.group = vocab_size, build.group
        self.scale, self.softcap = scale, softcap
        self.is_tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    @property
    def is_scaled(self) -> bool:
        """Whether the logits are scaled or capped after the projection."""
        return self.scale != 1 or self.softcap is not None

    def logits(self, hidden: ResidualStream, norm: RMSNorm) -> Tensor:
        """Return the float32 logits of the whole vocabulary on every rank, without padding."""
        shard, _ = self.after_norm(hidden, norm)
        if self.is_scaled:
            shard = self.ops.scale_logits(shard, self.scale, self.softcap)
        logits = self.group.gather_columns(shard)
        is_padded = logits.shape[1] > self.vocab_size
        return logits[:, : self.vocab_size].contiguous() if is_padded else logits

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return {} if self.is_tied else super().expected_tensors(path)

    def _pack(self, weight: Weight, allow_copy: bool) -> PackedLinear:
        return self.ops.pack_lm_head(weight, allow_copy)
