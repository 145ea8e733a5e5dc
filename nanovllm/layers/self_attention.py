"""Self-attention over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.attention.backend import AttentionSpec
from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.layers.layernorm import QKNorm, RMSNorm
from nanovllm.layers.linear import MergedLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import order_heads, rope_order
from nanovllm.layers.shards import replicated, sharded, split_kv_heads
from nanovllm.ops.interface import LayerCache, ResidualStream

if TYPE_CHECKING:
    from nanovllm.layers.all_heads_norm import AllHeadsNorm


class SelfAttention(Layer):
    """Self-attention; `merged` names the checkpoint weight that stores q, k and v as one.

    With an output gate, the checkpoint's q_proj stores the q and the gate of each head in turn;
    `qkv_proj` stores all gates first.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        build: BuildContext,
        qk_norm: QKNorm | AllHeadsNorm | None = None,
        merged: str | None = None,
    ) -> None:
        super().__init__()
        heads = sharded(config.num_heads, build.group)
        kv_heads = split_kv_heads(config.num_kv_heads, build.group)
        self.num_heads, self.head_dim = heads.count, config.head_dim
        self.layer_index, self.is_last = layer_index, layer_index + 1 == len(config.layers)
        self.attention, self.ops = build.attention, build.ops
        window = config.layers[layer_index].window
        scale, softcap = config.attention_scale, config.attention_softcap
        self.spec = AttentionSpec(scale, window, softcap, is_causal=config.is_causal)
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.num_gates = q.count if config.has_output_gate else 0
        outputs = {"q_proj": [q.times(2 if self.num_gates else 1)], "k_proj": [kv], "v_proj": [kv]}
        if merged is not None:
            outputs = {merged: [q, kv, kv]}
        inputs = replicated(config.hidden_size)
        order = rope_order(self.head_dim, config.layers[layer_index].rope)
        assert qk_norm is None or qk_norm.order == order, "qk_norm must have the order of q and k"
        if order is not None or self.num_gates:
            dims = order or list(range(self.head_dim))
            order = order_heads(dims, heads.count, kv_heads.count, self.num_gates > 0)
        self.qkv_proj = MergedLinear(inputs, outputs, config.qkv_bias, build, row_order=order)
        self.o_proj = RowParallelLinear(q, config.hidden_size, config.output_bias, build, "o_proj")
        self.qk_norm = qk_norm

    def forward(
        self, hidden: ResidualStream, norm: RMSNorm | None, rope: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the heads, before `o_proj`, and the residual."""
        qkv, residual = self.qkv_proj.after_norm(hidden, norm)
        gate, qkv = qkv[:, : self.num_gates], qkv[:, self.num_gates :]
        qkv = qkv.view(len(qkv), -1, self.head_dim)  # [tokens, q + k + v heads, dim]
        cache, plan = batch.caches[self.layer_index], batch.attention
        assert isinstance(cache, LayerCache)
        qk_norm = None if self.qk_norm is None else self.qk_norm.prepare(qkv)
        slot_mapping = batch.slot_mapping[cache.group]
        self.ops.rope_write(qkv, qk_norm, rope, batch.positions, cache, slot_mapping)
        q = qkv[:, : self.num_heads]
        # In the last layer, tokens without logits only need their keys and values cached.
        if self.is_last and (sampled := batch.sampled) is not None:
            q, residual, plan = q[sampled.index], residual[sampled.index], sampled.attention
            gate = gate[sampled.index]
        output = self.attention.attend(q, cache, plan, self.spec).flatten(1)
        if self.num_gates:
            output = self.ops.multiply_sigmoid(output, gate)
        return output, residual
