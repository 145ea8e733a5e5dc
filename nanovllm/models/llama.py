"""Llama 2 and 3, and the many models with the same architecture."""

from __future__ import annotations

from nanovllm.config import ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.decoder import DecoderLayer


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    self_attn = SelfAttention(config, layer_index, build)
    return DecoderLayer(config, self_attn, GatedMLP(config, build), build)
