"""Phi-3 and Phi-4: Llama's layer; checkpoints merge q, k and v, and also gate and up."""

from __future__ import annotations

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models import mistral
from nanovllm.models.decoder import DecoderLayer


def read_config(config: ConfigJson) -> ModelConfig:
    model = mistral.read_window(config)
    # YaRN is rejected, too: early Phi-3 checkpoints call longrope "yarn" or "su".
    if (kind := model.layers[0].rope.kind) != "default":
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported for Phi-3")
    return model


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    self_attn = SelfAttention(config, layer_index, build, merged="qkv_proj")
    return DecoderLayer(config, self_attn, GatedMLP(config, build, merged="gate_up_proj"), build)
