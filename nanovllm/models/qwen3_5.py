"""Qwen3.5 and Qwen3-Next: Gated DeltaNet in most layers, gated full attention in the others.

Qwen3.5 models are dense or have experts; Qwen3-Next, their predecessor, always has experts. Vision
towers are in `vision/`. Multi-token prediction (MTP) is not supported: its weights are skipped by
name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from nanovllm.checkpoint.gguf_architectures import TILED_HEADS_KEY
from nanovllm.config import ConfigJson, ModelConfig, RecurrentConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.gated_delta_net import GatedDeltaNet
from nanovllm.layers.layernorm import QKNorm
from nanovllm.layers.moe import build_mlp
from nanovllm.layers.rotary_embedding import rope_order
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models.config_json import field
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.qwen3_moe import read_experts
from nanovllm.models.rope_scaling import read_with_partial_rotary

LAYER_TYPES = ("linear_attention", "full_attention")
DEFAULTS = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def read_config(config: ConfigJson) -> ModelConfig:
    config = {**DEFAULTS, **config}
    model = read_with_partial_rotary(config, 0.25)
    recurrent = RecurrentConfig(
        layers=_read_recurrent_layers(config, len(model.layers)),
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_size=config["linear_conv_kernel_dim"],
        is_tiled=config.get(TILED_HEADS_KEY, False),
    )
    if recurrent.num_value_heads % recurrent.num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads={recurrent.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={recurrent.num_key_heads}"
        )
    return replace(model, norm_offset=1.0, has_output_gate=True, recurrent=recurrent)


def read_moe_config(config: ConfigJson) -> ModelConfig:
    shared = field(config, "shared_expert_intermediate_size")
    # The config of a model without dense layers may omit their size.
    size = config.get("intermediate_size") or shared
    config = {"norm_topk_prob": True, **config, "intermediate_size": size}
    model = read_experts(read_config(config), config)
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, shared_size=shared))


def _read_recurrent_layers(config: ConfigJson, num_layers: int) -> frozenset[int]:
    interval = config["full_attention_interval"]
    kinds = config.get("layer_types") or [
        LAYER_TYPES[(i + 1) % interval == 0] for i in range(num_layers)
    ]
    if unknown := sorted({str(kind) for kind in kinds} - set(LAYER_TYPES)):
        raise UnsupportedModelError(
            f"layer_types {', '.join(unknown)}: only {LAYER_TYPES} are supported"
        )
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    if set(kinds) != set(LAYER_TYPES):
        raise UnsupportedModelError(f"layer_types must include both of {LAYER_TYPES}")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def build_layer(
    config: ModelConfig, layer_index: int, build: BuildContext, is_grouped: bool = False
) -> DecoderLayer:
    """Build a layer; see GatedDeltaNet for `is_grouped`."""
    assert config.recurrent is not None
    mlp = build_mlp(config, layer_index, build)
    if layer_index in config.recurrent.layers:
        delta_net = GatedDeltaNet(config, layer_index, build, is_grouped)
        return DecoderLayer(config, delta_net, mlp, build, attention_name="linear_attn")
    order = rope_order(config.head_dim, config.layers[layer_index].rope)
    self_attn = SelfAttention(config, layer_index, build, QKNorm(config, build, order))
    return DecoderLayer(config, self_attn, mlp, build)


build_next_layer = partial(build_layer, is_grouped=True)
