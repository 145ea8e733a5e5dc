"""AllHeadsNorm: one norm over all heads of q, and one over all heads of k, as in OLMo."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, Layer
from nanovllm.layers.shards import ExpectedTensor, expect_shards, sharded, split_kv_heads
from nanovllm.ops.interface import QKNormWeights


class AllHeadsNorm(Layer):
    """RMSNorm over all heads of q, and over all heads of k; each rank holds only some heads."""

    order = None  # a head's dimensions keep the order of the checkpoint

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.group = build.group
        heads = (
            sharded(config.num_heads, build.group),
            split_kv_heads(config.num_kv_heads, build.group),
        )
        self.shards = [shard.times(config.head_dim) for shard in heads]
        self.q, self.k = (
            build.parameter(shard.count, config.head_dim, dtype=torch.float32) for shard in heads
        )
        self.weights = QKNormWeights(self.q, self.k, config.rms_norm_eps, is_over_all_heads=True)

    def prepare(self, qkv: Tensor) -> QKNormWeights | None:
        """Return the weights for `Ops.rope_write`, or None if q and k are already normalized.

        With several ranks, this method normalizes them, because that needs a sum over the ranks.
        """
        if self.group.is_alone:
            return self.weights
        parts = qkv[:, : len(self.q)], qkv[:, len(self.q) : len(self.q) + len(self.k)]
        sums = torch.stack([part.float().square().sum((1, 2)) for part in parts])
        self.group.all_reduce(sums)  # [q and k, tokens]
        for part, total, weight in zip(parts, sums, (self.q, self.k), strict=True):
            # If ranks outnumber KV heads, both the sum and the divisor count each head repeatedly.
            mean = total / (weight.numel() * self.group.size)
            scale = torch.rsqrt(mean + self.weights.eps)[:, None, None]
            part.copy_((part.float() * scale).to(part.dtype) * weight)
        return None

    def expected_tensors(self, path: str) -> dict[str, ExpectedTensor]:
        parent = path.rpartition(".")[0]
        names = f"{parent}.q_norm.weight", f"{parent}.k_norm.weight"
        weights = zip(names, (self.q, self.k), self.shards, strict=True)
        return {name: expect_shards(weight.view(-1), [shard]) for name, weight, shard in weights}
