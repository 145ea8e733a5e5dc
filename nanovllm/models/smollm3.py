"""SmolLM3: Llama's layer, without RoPE in some layers."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.models.config_json import NO_ROPE, read_model_config


def read_config(config: ConfigJson) -> ModelConfig:
    if config.get("use_sliding_window"):
        raise UnsupportedModelError("use_sliding_window is not supported for SmolLM3")
    model = read_model_config({"tie_word_embeddings": True, "rope_theta": 2e6, **config})
    interval = config.get("no_rope_layer_interval", 4)
    # Despite its name, this list marks the layers that rotate q and k.
    is_rotated = config.get("no_rope_layers") or [
        (i + 1) % interval for i in range(len(model.layers))
    ]
    layers = (
        layer if rotates else replace(layer, rope=NO_ROPE)
        for layer, rotates in zip(model.layers, is_rotated, strict=True)
    )
    return replace(model, layers=tuple(layers))
