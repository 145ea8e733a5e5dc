"""GLM-4: partial RoPE, which rotates interleaved pairs, and four norms per layer."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, LayerAttention, ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.post_norm import NormNames, SandwichLayer
from nanovllm.models.rope_scaling import read_with_partial_rotary

DEFAULTS = {"head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-07}
NORMS = NormNames(
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def read_config(config: ConfigJson) -> ModelConfig:
    model = read_with_partial_rotary({**DEFAULTS, **config}, 0.5)
    rope = replace(model.layers[0].rope, is_interleaved=True)
    layers = (LayerAttention(rope),) * len(model.layers)
    return replace(model, layers=layers, output_bias=False, mlp_bias=False)


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> SandwichLayer:
    self_attn, mlp = _build_parts(config, layer_index, build)
    return SandwichLayer(config, self_attn, mlp, build, NORMS)


def build_glm_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    """Build a layer of the first GLM-4 models, which have no norms after attention and MLP."""
    self_attn, mlp = _build_parts(config, layer_index, build)
    return DecoderLayer(config, self_attn, mlp, build)


def _build_parts(
    config: ModelConfig, layer_index: int, build: BuildContext
) -> tuple[SelfAttention, GatedMLP]:
    mlp = GatedMLP(config, build, merged="gate_up_proj")
    return SelfAttention(config, layer_index, build), mlp
