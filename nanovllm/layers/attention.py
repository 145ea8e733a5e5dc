"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.layers.build import Build, ForwardBatch, Layer
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.layers.rotary_embedding import rotate


class SelfAttention(Layer):
    """`qk_norm` is a module over the stacked heads of q and k, or None."""

    def __init__(
        self, config: ModelConfig, layer_index: int, build: Build, qk_norm: nn.Module | None
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.layer_index = layer_index
        self.attention = build.attention
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.attention_bias, build)
        self.o_proj = Linear(q_size, config.hidden_size, config.attention_bias, build, "o_proj")
        self.qk_norm = qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        num_tokens, num_qk_heads = x.shape[0], self.num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(num_tokens, -1, self.head_dim)  # [tokens, q + k + v heads, dim]
        qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, cos, sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        cache = batch.caches[self.layer_index]
        self.attention.write(k, v, cache, batch.attention)
        output = self.attention.attend(q, k, v, cache, batch.attention)
        return self.o_proj(output.view(num_tokens, -1))
