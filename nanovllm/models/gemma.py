"""Gemma 2 and 3 (text): norms before and after attention and MLP, scaled embeddings, windows.

Gemma 2 has no norms on q and k; its attention scores and logits have softcaps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanovllm.config import ConfigJson, LayerAttention, ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.config_json import read_model_config, read_rope_config
from nanovllm.models.post_norm import NormNames, SandwichLayer
from nanovllm.models.sliding_window import mixed_layers, sliding_layers, with_window

DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
}
# The config.json of a multimodal model may omit these, too.
TEXT_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
}
NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read_config(config: ConfigJson) -> ModelConfig:
    refuse(config, "attn_logit_softcapping", "final_logit_softcapping")
    config = {**DEFAULTS, **TEXT_DEFAULTS, **_without_null(config)}
    if config.get("use_bidirectional_attention"):  # the window is centered on the query
        config["sliding_window"] = config["sliding_window"] // 2 + 1
    layers = mixed_layers(
        config,
        config["sliding_window_pattern"],
        local_theta=config["rope_local_base_freq"],
        theta=config.get("rope_theta", 1e6),
    )
    return replace(
        read_shared_config(config),
        layers=layers,
        is_causal=not config.get("use_bidirectional_attention"),
    )


def read_gemma2_config(config: ConfigJson) -> ModelConfig:
    refuse(config, "use_bidirectional_attention")
    model = read_shared_config(config)
    sliding = sliding_layers(config)
    model = replace(
        model,
        layers=(LayerAttention(read_rope_config(config)),) * len(model.layers),
        # null in config.json disables a softcap.
        attention_softcap=config.get("attn_logit_softcapping", 50.0) or None,
        logits_softcap=config.get("final_logit_softcapping", 30.0) or None,
    )
    windowed = range(0, len(model.layers), 2) if sliding is None else sliding
    return with_window(model, config.get("sliding_window", 4096), windowed)


def read_shared_config(config: ConfigJson) -> ModelConfig:
    """Read what Gemma 2 and 3 have in common: all but RoPE, windows and softcaps."""
    config = {**DEFAULTS, **_without_null(config)}
    shared = {"hidden_act": config["hidden_activation"], "rope_parameters": None}
    model = read_model_config({**config, **shared, "rope_scaling": None})
    return replace(
        model,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        embedding_scale=model.hidden_size**0.5,
        dtype="bfloat16" if model.dtype == "float16" else model.dtype,  # float16 would overflow
        norm_offset=1.0,
    )


def refuse(config: ConfigJson, *names: str) -> None:
    for name in names:
        if config.get(name):
            raise UnsupportedModelError(f"{name}={config[name]!r} in config.json is not supported")


def _without_null(config: ConfigJson) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> SandwichLayer:
    self_attn = SelfAttention(config, layer_index, build, QKNorm(config, build))
    return SandwichLayer(config, self_attn, GatedMLP(config, build), build, NORMS)


def build_gemma2_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> SandwichLayer:
    self_attn = SelfAttention(config, layer_index, build)
    return SandwichLayer(config, self_attn, GatedMLP(config, build), build, NORMS)
