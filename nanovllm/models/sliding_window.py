"""Read which layers of a model have a sliding window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanovllm.config import ConfigJson, LayerAttention, ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.models.config_json import field, read_rope_config


def with_window(model: ModelConfig, window: int | None, layers: Iterable[int]) -> ModelConfig:
    """Return the config with a sliding window in some layers; 0 or None means no window."""
    chosen = set(layers)
    attention = (
        replace(layer, window=window or None) if i in chosen else layer
        for i, layer in enumerate(model.layers)
    )
    return replace(model, layers=tuple(attention))


def with_upper_windows(model: ModelConfig, config: ConfigJson) -> ModelConfig:
    """Add a window where `layer_types` has one or, without it, from `max_window_layers` on."""
    layers: Iterable[int] | None = sliding_layers(config)
    if layers is None:
        layers = range(config.get("max_window_layers", 28), len(model.layers))
    return with_window(model, config.get("sliding_window", 4096), layers)


def sliding_layers(config: ConfigJson) -> list[int] | None:
    """Return the sliding-window layers in `layer_types`, or None if the config has no such list."""
    if (kinds := config.get("layer_types")) is None:
        return None
    known = ("sliding_attention", "full_attention")
    if unknown := sorted(str(kind) for kind in kinds if kind not in known):
        raise UnsupportedModelError(f"layer_types {', '.join(unknown)}: only {known} are supported")
    if len(kinds) != field(config, "num_hidden_layers"):
        raise CheckpointError(
            f"layer_types has {len(kinds)} entries for {config['num_hidden_layers']} layers"
        )
    return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]


def mixed_layers(
    config: ConfigJson, period: int, local_theta: float, theta: float
) -> tuple[LayerAttention, ...]:
    """Return the layers of a model whose sliding-window layers have a different RoPE.

    Without `layer_types`, every `period`-th layer has full attention. `local_theta` is the default
    RoPE base of sliding-window layers, `theta` that of the others.
    """
    num_layers, sliding = field(config, "num_hidden_layers"), sliding_layers(config)
    if sliding is None:
        sliding = [i for i in range(num_layers) if (i + 1) % period]
    local, whole = _read_ropes(config, local_theta, theta)
    windowed = LayerAttention(local, config.get("sliding_window"))
    return tuple(windowed if i in sliding else LayerAttention(whole) for i in range(num_layers))


def _read_ropes(
    config: ConfigJson, local_theta: float, theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE of sliding-window layers and of full-attention layers.

    `rope_scaling` applies to full-attention layers only.
    """
    ropes = config.get("rope_parameters") or {}
    by_type = {kind: rope or {} for kind, rope in ropes.items()}
    if unknown := sorted(set(by_type) - {"sliding_attention", "full_attention"}):
        raise CheckpointError(f"rope_parameters must be keyed by layer type, got {unknown}")
    local = {"rope_theta": local_theta} | by_type.get("sliding_attention", {})
    whole = {"rope_theta": theta} | by_type.get("full_attention", {})
    whole |= config.get("rope_scaling") or {}
    local_rope, whole_rope = (
        read_rope_config({**config, "rope_parameters": rope, "rope_scaling": None})
        for rope in (local, whole)
    )
    return local_rope, whole_rope
