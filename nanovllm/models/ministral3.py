"""Ministral 3: Mistral's layer, with queries that are scaled by their position."""

from __future__ import annotations

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import UnsupportedModelError
from nanovllm.models import mistral

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5}


def read_config(config: ConfigJson) -> ModelConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if scaling.get("llama_4_scaling_beta") and kind != "yarn":
        raise UnsupportedModelError(f"llama_4_scaling_beta is not supported with rope {kind!r}")
    return mistral.read_window({**DEFAULTS, **config})
