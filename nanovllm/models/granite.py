"""Granite: Llama's layer, with multipliers for embeddings, attention, residuals and logits.

Granite multiplies the outputs of attention and MLP by a constant before adding them to the residual
stream. We divide the stream by this constant instead, and add the outputs unchanged. Only norms
read the stream, and apart from their eps, they do not depend on its scale.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.models.config_json import read_model_config


def read_config(config: ConfigJson) -> ModelConfig:
    model = read_model_config({"rms_norm_eps": 1e-6, **config})
    if not (multiplier := config.get("residual_multiplier", 1.0)) > 0:
        raise CheckpointError(f"config.json: residual_multiplier={multiplier} must be above 0")
    return replace(
        model,
        attention_scale=config.get("attention_multiplier", 1.0),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        embedding_divisor=multiplier,
        rms_norm_eps=model.rms_norm_eps / multiplier**2,
        logits_scale=1.0 / config.get("logits_scaling", 1.0),
        dtype="bfloat16" if model.dtype == "float16" else model.dtype,  # float16 might overflow
    )
