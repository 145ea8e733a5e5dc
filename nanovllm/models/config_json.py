"""Read the fields of config.json that all families share, as transformers 4 or 5 writes them."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from nanovllm.checkpoint.quantization import read_quantization
from nanovllm.config import DTYPES, ConfigJson, LayerAttention, ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.validation import check_types

INT32_MAX = 2**31 - 1
MAX_SIZE, MAX_LAYERS = 1 << 24, 1 << 10
# The memory estimate uses these sizes, so they are checked first; SIZES has their valid ranges.
POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
MAYBE_ZERO = (  # 0: a dense model, or no shared expert
    *("num_experts", "num_local_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
SIZES = {
    **dict.fromkeys(POSITIVE, (1, MAX_SIZE)),
    **dict.fromkeys(MAYBE_ZERO, (0, MAX_SIZE)),
    **dict.fromkeys(("num_hidden_layers", "full_attention_interval"), (1, MAX_LAYERS)),
    "max_position_embeddings": (1, INT32_MAX),
    "sliding_window": (0, INT32_MAX),  # 0: no window
    "linear_conv_kernel_dim": (2, MAX_SIZE),
}
# Classes without an LM head for which replacing "Model" with "ForCausalLM" gives the wrong class.
# Gemma3Model is multimodal: it keeps its name, and is then rejected as unsupported.
BODIES = {"Gemma3TextModel": "Gemma3ForCausalLM", "Gemma3Model": "Gemma3Model"}
# Frequencies divided by infinity are 0: q and k are not rotated.
NO_ROPE = RopeConfig(theta=1.0, kind="linear", factor=math.inf)
ROPE_NAMES = {"theta": "rope_theta", "factor": "the rope factor"}  # of fields of RopeConfig
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def check_fields(config: ConfigJson) -> None:
    """Raise CheckpointError for sizes of the wrong type or range; null counts as missing."""
    for name, (low, high) in SIZES.items():
        value = config.get(name)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise CheckpointError(
                f"config.json: {name} must be a whole number from {low} to {high:,}, "
                f"got {reprlib.repr(value)}"
            )


def check_model(model: ModelConfig) -> None:
    """Raise CheckpointError for values of the wrong type, and for inconsistent sizes."""
    ropes = list({id(layer.rope): layer.rope for layer in model.layers}.values())
    try:
        for record in (model, *ropes, model.experts, model.recurrent):
            if record is not None:
                check_types(record)
                _check_numbers(record)
    except ConfigError as error:
        raise CheckpointError(f"config.json: {error}") from error
    if model.num_heads % model.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={model.num_heads} is not a multiple of "
            f"num_key_value_heads={model.num_kv_heads}"
        )
    if model.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim={model.head_dim} must be even for rotation")


def _check_numbers(record: Any) -> None:
    """Raise ConfigError for NaN, and for a rope theta or factor that is not positive."""
    for each in fields(record):
        value, name = getattr(record, each.name), ROPE_NAMES.get(each.name, each.name)
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{name} must be a number, got NaN")
        if each.name in ROPE_NAMES and value <= 0:
            raise ConfigError(f"{name} must be above 0, got {value}")


def read_model_config(config: ConfigJson) -> ModelConfig:
    """Read the fields that all families share; a family's own file reads the rest.

    Unsupported settings that would change the output raise an error that names them.
    """
    hidden_size, num_heads = field(config, "hidden_size"), field(config, "num_attention_heads")
    activation = config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not supported (supported: {', '.join(ACTIVATIONS)})"
        )
    if config.get("is_causal") is False:
        raise UnsupportedModelError(
            "is_causal=False in config.json (attention to later tokens) is not supported"
        )
    if (quantization := config.get("quantization_config")) is not None:
        read_quantization(quantization)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    bias = config.get("attention_bias", False)
    rope = read_rope_config(config)
    max_position = field(config, "max_position_embeddings")
    if rope.kind != "default":
        from nanovllm.models.rope_scaling import scaled_length

        max_position = min(scaled_length(max_position, rope), INT32_MAX)
    return ModelConfig(
        architecture=read_architecture(config),
        vocab_size=field(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=field(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=field(config, "rms_norm_eps"),
        layers=(LayerAttention(rope),) * field(config, "num_hidden_layers"),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        max_position_embeddings=max_position,
        dtype=dtype if dtype in DTYPES else "float32",
        activation=ACTIVATIONS[activation],
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
    )


def read_architecture(config: ConfigJson) -> str:
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json must list exactly one architecture, got {reprlib.repr(names)}"
        )
    [name] = names
    # A class named "...Model" has no LM head; embedding models are stored this way.
    return BODIES.get(name) or re.sub("Model$", "ForCausalLM", name)


def read_rope_config(config: ConfigJson) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise CheckpointError(
            "config.json has both rope_parameters and rope_scaling; move the contents of "
            "rope_scaling into rope_parameters"
        )
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if by_type := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(
            f"rope_parameters by layer type ({', '.join(by_type)}) are not supported for this model"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    thetas = (scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)
    theta = next(theta for theta in thetas if theta is not None)
    turned = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if turned != 1:
        raise UnsupportedModelError(f"partial_rotary_factor {turned} is not supported")
    if kind == "default":
        return RopeConfig(theta)
    from nanovllm.models.rope_scaling import read_scaled_rope

    return read_scaled_rope(kind, theta, scaling, config)


def field(config: ConfigJson, name: str) -> Any:
    if config.get(name) is None:
        raise CheckpointError(
            f"config.json has no {name!r}, which a language model of its kind needs"
        )
    return config[name]
