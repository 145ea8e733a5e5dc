"""Mistral: Llama's layer, which may see no further back than a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.config_json import read_model_config, with_window


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return read_window({"sliding_window": 4096, **config})


def read_window(config: Mapping[str, Any]) -> ModelConfig:
    model = read_model_config(config)
    return with_window(model, config.get("sliding_window"), range(model.num_layers))
