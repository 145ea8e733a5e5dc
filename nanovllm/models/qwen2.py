"""Qwen2 and 2.5: Llama's layer with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.config_json import field, read_model_config, sliding_layers, with_window


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return replace(read_windows(config), qkv_bias=True, output_bias=False)


def read_windows(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config; with use_sliding_window, layers from max_window_layers on have a window."""
    config = {"sliding_window": 4096, "max_window_layers": 28, **config}
    model = read_model_config(config)
    if not config.get("use_sliding_window"):
        return model
    layers = sliding_layers(config)
    if layers is None:
        layers = list(range(field(config, "max_window_layers"), model.num_layers))
    return with_window(model, config["sliding_window"], layers)
