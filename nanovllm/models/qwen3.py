"""Qwen3: Llama's layer with RMSNorm on every head of q and k."""

from __future__ import annotations

from nanovllm.config import ModelConfig
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.build import Build
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.mlp import GatedMLP
from nanovllm.models.decoder import DecoderLayer


def build_layer(config: ModelConfig, layer_index: int, build: Build) -> DecoderLayer:
    qk_norm = QKNorm(config.head_dim, config.rms_norm_eps, build)
    self_attn = SelfAttention(config, layer_index, build, qk_norm)
    return DecoderLayer(config, self_attn, GatedMLP(config, build), build)
