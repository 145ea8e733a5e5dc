"""OLMo 2 and 3: norms after attention and MLP, and over all heads of q and of k."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.layers.all_heads_norm import AllHeadsNorm
from nanovllm.layers.build import BuildContext
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.config_json import read_model_config
from nanovllm.models.post_norm import PostNormLayer
from nanovllm.models.sliding_window import mixed_layers


def read_config(config: ConfigJson) -> ModelConfig:
    return read_model_config({"rms_norm_eps": 1e-5, **config})


def read_olmo3_config(config: ConfigJson) -> ModelConfig:
    """Read OLMo 3: some layers (by default every fourth) have full attention and scaled RoPE.

    The others have a sliding window.
    """
    config = {"sliding_window": 4096, **config}
    theta = config.get("rope_theta", 5e5)
    model = read_config({**config, "rope_parameters": None, "rope_scaling": None})
    return replace(model, layers=mixed_layers(config, 4, theta, theta))


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> PostNormLayer:
    self_attn = SelfAttention(config, layer_index, build, AllHeadsNorm(config, build))
    return PostNormLayer(config, self_attn, GatedMLP(config, build), build)
