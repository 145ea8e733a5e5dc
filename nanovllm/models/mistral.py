"""Mistral: Llama's layer, with an optional sliding window.

Ministral 3 also scales queries by their position.
"""

from __future__ import annotations

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.models.config_json import read_model_config
from nanovllm.models.sliding_window import sliding_layers, with_window

MINISTRAL3_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5}


def read_config(config: ConfigJson) -> ModelConfig:
    config = {"sliding_window": 4096, **config}
    if (layers := sliding_layers(config)) is None:
        return read_window(config)
    # Ministral lists its sliding-window layers in `layer_types`.
    return with_window(read_model_config(config), config["sliding_window"], layers)


def read_ministral3_config(config: ConfigJson) -> ModelConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if scaling.get("llama_4_scaling_beta") and kind != "yarn":
        raise UnsupportedModelError(f"llama_4_scaling_beta is not supported with rope {kind!r}")
    return read_window({**MINISTRAL3_DEFAULTS, **config})


def read_window(config: ConfigJson) -> ModelConfig:
    model = read_model_config(config)
    return with_window(model, config.get("sliding_window"), range(len(model.layers)))
