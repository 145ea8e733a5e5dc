"""Qwen2 and 2.5: Llama's layer with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.models.config_json import read_model_config
from nanovllm.models.sliding_window import with_upper_windows


def read_config(config: ConfigJson) -> ModelConfig:
    model = replace(read_model_config(config), qkv_bias=True, output_bias=False)
    return with_upper_windows(model, config) if config.get("use_sliding_window") else model
