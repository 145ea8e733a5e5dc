"""RMSNorm layers; a norm is usually applied by the projection after it, which may fuse the two."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.shards import ExpectedTensor, expect_replicated
from nanovllm.ops.interface import NormWeights, QKNormWeights, ResidualStream


class RMSNorm(Layer):
    """RMSNorm of hidden states."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.weight = build.parameter(config.hidden_size, dtype=torch.float32)
        self.weights = NormWeights(self.weight, config.rms_norm_eps)
        self.offset = config.norm_offset
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(ResidualStream(x), self.weights)[0]

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + norm(x)."""
        return self.ops.add_norm(residual, x, self.weights)

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        return {f"{path}.weight": expect_replicated(self.weight)}

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        self.weight.add_(self.offset)


class QKNorm(Layer):
    """RMSNorm of every head of q and k; `Ops.rope_write` applies it before the rotation.

    `order` is the order in which q and k store the dimensions of a head (`rope_order`).
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, order: list[int] | None = None
    ) -> None:
        super().__init__()
        self.order = order
        self.weight = build.parameter(2, config.head_dim, dtype=torch.float32)
        self.weights = QKNormWeights(self.weight[0], self.weight[1], config.rms_norm_eps)
        self.offset = config.norm_offset

    def prepare(self, qkv: Tensor) -> QKNormWeights | None:
        """Return the weights for `Ops.rope_write`, or None if q and k are already normalized."""
        return self.weights

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        parent = path.rpartition(".")[0]
        q, k = map(expect_replicated, self.weight)
        return {f"{parent}.q_norm.weight": q, f"{parent}.k_norm.weight": k}

    def process_weights_after_loading(self, allow_copy: bool) -> None:
        self.weight.add_(self.offset)
        if self.order is not None:
            self.weight.copy_(self.weight[:, self.order])
