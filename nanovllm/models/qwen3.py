"""Qwen3: Llama's layer with RMSNorm on every head of q and k."""

from __future__ import annotations

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.config_json import read_model_config
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.sliding_window import with_upper_windows


def read_config(config: ConfigJson) -> ModelConfig:
    model = read_model_config({"head_dim": 128, **config})
    return with_upper_windows(model, config) if config.get("use_sliding_window") else model


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    self_attn = SelfAttention(config, layer_index, build, QKNorm(config, build))
    return DecoderLayer(config, self_attn, GatedMLP(config, build), build)
