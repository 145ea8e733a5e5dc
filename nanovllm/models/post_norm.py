"""Decoder layers that normalize the outputs of attention and MLP."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext, ForwardBatch, Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.ops.interface import ResidualStream


class NormNames(NamedTuple):
    """A checkpoint's names for the norms after attention, before the MLP and after the MLP."""

    after_attention: str
    before_mlp: str
    after_mlp: str


class SandwichLayer(Layer):
    """Attention and MLP, each with a norm before and after; both add to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: SelfAttention,
        mlp: GatedMLP,
        build: BuildContext,
        names: NormNames,
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm = RMSNorm(config, build)
        # A tuple does not register its modules, so each norm has only its checkpoint name.
        self.norms = tuple(RMSNorm(config, build) for _ in names)
        for name, norm in zip(names, self.norms, strict=True):
            self.add_module(name, norm)

    def forward(self, hidden: ResidualStream, rope: Tensor, batch: ForwardBatch) -> ResidualStream:
        after_attention, before_mlp, after_mlp = self.norms
        output, residual = self.self_attn(hidden, self.input_layernorm, rope, batch)
        hidden = ResidualStream(residual, after_attention(self.self_attn.o_proj(output)))
        gated, residual = self.mlp.gate_up_proj.after_norm(hidden, before_mlp)
        return ResidualStream(residual, after_mlp(self.mlp.down_proj(gated)))


class PostNormLayer(Layer):
    """Attention and MLP; each output is normalized, then added to the residual stream."""

    def __init__(
        self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP, build: BuildContext
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.post_attention_layernorm = RMSNorm(config, build)
        self.post_feedforward_layernorm = RMSNorm(config, build)

    def forward(self, hidden: ResidualStream, rope: Tensor, batch: ForwardBatch) -> ResidualStream:
        output, x = self.self_attn(hidden, None, rope, batch)
        x = self.post_attention_layernorm.add_to(x, self.self_attn.o_proj(output))
        output = self.mlp.down_proj(self.mlp.gate_up_proj(x))
        return ResidualStream(self.post_feedforward_layernorm.add_to(x, output))
