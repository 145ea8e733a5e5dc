"""Read the variants of RoPE from config.json: scaled frequencies, and partial rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.config import ConfigJson, LayerAttention, ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.models.config_json import field, read_model_config

KINDS = ("linear", "dynamic", "llama3", "yarn", "factors")  # "factors": GGUF only


def scaled_length(max_position: int, rope: RopeConfig) -> int:
    """Return the maximum number of positions, which some kinds of rope scaling extend."""
    if rope.kind == "yarn":
        return max(max_position, int(rope.factor * rope.original_max_position))
    return int(rope.factor * max_position) if rope.kind in ("linear", "dynamic") else max_position


def read_with_partial_rotary(config: ConfigJson, default_factor: float) -> ModelConfig:
    """Read a model that rotates only a part of each head, given by `partial_rotary_factor`."""
    layouts = ("rope_parameters", "rope_scaling")
    ropes = {name: dict(config[name]) for name in layouts if config.get(name)}
    factors = [rope.pop("partial_rotary_factor", None) for rope in ropes.values()]
    factors += [config.get("partial_rotary_factor"), default_factor]
    factor = next(factor for factor in factors if factor is not None)
    model = read_model_config({**config, **ropes, "partial_rotary_factor": None})
    rotary_dim = int(model.head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= model.head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor={factor} rotates {rotary_dim} of "
            f"{model.head_dim} dimensions; an even number is needed"
        )
    rope = replace(model.layers[0].rope, rotary_dim=rotary_dim)
    return replace(model, layers=(LayerAttention(rope),) * len(model.layers))


def read_scaled_rope(
    kind: Any, theta: float, scaling: Mapping[str, Any], config: ConfigJson
) -> RopeConfig:
    """Read a rope config of a kind other than "default"."""
    if kind not in KINDS:
        supported = ", ".join(("default", *KINDS))
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported (supported: {supported})"
        )
    if kind == "linear":
        return RopeConfig(theta, kind, factor=field(scaling, "factor"))
    if kind == "factors":
        return RopeConfig(theta, kind, factors=_read_factors(scaling, config))
    name = "original_max_position_embeddings"
    trained = config.get(name) or scaling.get(name)
    max_position = field(config, "max_position_embeddings")
    if kind == "dynamic":
        return RopeConfig(theta, kind, field(scaling, "factor"), original_max_position=max_position)
    if kind == "yarn":
        return _read_yarn(theta, scaling, int(trained or max_position), max_position)
    return RopeConfig(
        theta,
        kind,
        factor=field(scaling, "factor"),
        low_freq_factor=field(scaling, "low_freq_factor"),
        high_freq_factor=field(scaling, "high_freq_factor"),
        original_max_position=int(trained or max_position),
    )


def _read_factors(scaling: Mapping[str, Any], config: ConfigJson) -> tuple[float, ...]:
    factors = tuple(field(scaling, "factors"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    is_valid = all(isinstance(factor, (int, float)) and factor > 0 for factor in factors)
    if not is_valid or len(factors) != head_dim // 2:
        raise CheckpointError(
            f"config.json: {len(factors)} rope factors for {head_dim // 2} pairs of dimensions; "
            "each pair needs one above 0"
        )
    return factors


def _read_yarn(
    theta: float, scaling: Mapping[str, Any], trained: int, max_position: int
) -> RopeConfig:
    factor = scaling.get("factor")
    factor = max_position / trained if factor is None else factor
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scales = (over, under) if over and under else (1.0, 0.0)
        above, below = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
        attention_factor = above / below
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        is_truncated=scaling.get("truncate", True),
        attention_factor=attention_factor,
        q_scaling=scaling.get("llama_4_scaling_beta") or 0.0,
    )
