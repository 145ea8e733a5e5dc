"""Gemma 2: Gemma 3's layer without norms on q and k; attention scores and logits have softcaps."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, LayerAttention, ModelConfig
from nanovllm.layers.build import BuildContext
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models import gemma3
from nanovllm.models.config_json import read_rope_config
from nanovllm.models.post_norm import SandwichLayer
from nanovllm.models.sliding_window import sliding_layers, with_window


def read_config(config: ConfigJson) -> ModelConfig:
    gemma3.refuse(config, "use_bidirectional_attention")
    model = gemma3.read_shared_config(config)
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


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> SandwichLayer:
    self_attn = SelfAttention(config, layer_index, build)
    return SandwichLayer(config, self_attn, GatedMLP(config, build), build, gemma3.NORMS)
