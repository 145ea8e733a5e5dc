"""Mixtral: Mistral's attention, and experts instead of every MLP."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import ConfigJson, ExpertsConfig, ModelConfig
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.build import BuildContext
from nanovllm.layers.moe import ExpertNames, SparseMoeBlock
from nanovllm.layers.self_attention import SelfAttention
from nanovllm.models import mistral
from nanovllm.models.config_json import field
from nanovllm.models.decoder import DecoderLayer

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def read_config(config: ConfigJson) -> ModelConfig:
    model = mistral.read_window({"rope_theta": 1e6, **config})
    experts = ExpertsConfig(
        num_experts=field(config, "num_local_experts"),
        top_k=field(config, "num_experts_per_tok"),
        size=model.intermediate_size,
        is_normalized=True,
    )
    return with_experts(model, experts)


def with_experts(model: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    if model.activation != "silu":
        raise UnsupportedModelError("hidden_act: experts are only supported with 'silu'")
    if not 1 <= experts.top_k <= experts.num_experts or experts.size < 1:
        raise CheckpointError(
            f"config.json routes each token to {experts.top_k} (num_experts_per_tok) of "
            f"{experts.num_experts} experts of size {experts.size}, which is impossible"
        )
    return replace(model, experts=experts)


def build_layer(config: ModelConfig, layer_index: int, build: BuildContext) -> DecoderLayer:
    self_attn = SelfAttention(config, layer_index, build)
    experts = SparseMoeBlock(config, build, NAMES)
    return DecoderLayer(config, self_attn, experts, build, mlp_name="block_sparse_moe")
