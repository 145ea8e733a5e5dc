"""Qwen3-MoE: Qwen3's attention, and experts instead of MLPs, by default in every layer."""

from __future__ import annotations

from nanovllm.config import ConfigJson, ExpertsConfig, ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.moe import build_mlp
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.config_json import field, read_model_config
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.mixtral import with_experts
from nanovllm.models.sliding_window import with_window


def read_config(config: ConfigJson) -> ModelConfig:
    model = read_model_config(config)
    if config.get("use_sliding_window"):
        window = config.get("sliding_window", 4096)
        model = with_window(model, window, range(len(model.layers)))
    return read_experts(model, config)


def read_experts(model: ModelConfig, config: ConfigJson) -> ModelConfig:
    """Return `model` with the experts that config.json describes."""
    step = config.get("decoder_sparse_step", 1)
    is_dense = {i for i in range(len(model.layers)) if (i + 1) % step} | set(
        config.get("mlp_only_layers") or ()
    )
    experts = ExpertsConfig(
        num_experts=config.get("num_experts") or field(config, "num_local_experts"),
        top_k=field(config, "num_experts_per_tok"),
        size=field(config, "moe_intermediate_size"),
        is_normalized=config.get("norm_topk_prob", False),
        dense_layers=frozenset(is_dense),
    )
    return with_experts(model, experts)


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    self_attn = SelfAttention(config, layer_index, build, QKNorm(config, build))
    return DecoderLayer(config, self_attn, build_mlp(config, layer_index, build), build)
