"""Mistral: Llama's layer, with an optional sliding window."""

from __future__ import annotations

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.models.config_json import read_model_config
from nanovllm.models.sliding_window import sliding_layers, with_window


def read_config(config: ConfigJson) -> ModelConfig:
    config = {"sliding_window": 4096, **config}
    if (layers := sliding_layers(config)) is None:
        return read_window(config)
    # Ministral lists its sliding-window layers in `layer_types`.
    return with_window(read_model_config(config), config["sliding_window"], layers)


def read_window(config: ConfigJson) -> ModelConfig:
    model = read_model_config(config)
    return with_window(model, config.get("sliding_window"), range(len(model.layers)))
