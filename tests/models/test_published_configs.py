"""The facts of published config.json files, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.checkpoint.find import eos_token_ids, find_checkpoint, stores_quantized
from nanovllm.config import (
    ExpertsConfig,
    LayerAttention,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanovllm.errors import CheckpointError
from nanovllm.models.config_json import NO_ROPE
from nanovllm.models.registry import read_config, read_config_for

Facts = dict[str, Any]

SMOLLM3_3B: Facts = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}

OLMO2_7B: Facts = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 100352,
}
OLMO3_7B: Facts = {
    **OLMO2_7B,
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}

GRANITE_2B: Facts = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}

GLM4_9B: Facts = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}

GEMMA2_2B: Facts = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}

MINISTRAL3_8B: Facts = {  # the text_config of Mistral3ForConditionalGeneration
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}

GEMMA3_4B: Facts = {  # everything else has the default of transformers' Gemma3TextConfig
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}

GPT_OSS_20B: Facts = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


QWEN3_5_35B_A3B: Facts = {  # the text_config of Qwen3_5MoeForConditionalGeneration
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
}


def test_qwen3_5() -> None:
    model = read_config(QWEN3_5_35B_A3B)
    assert sizes(model) == (40, 2048, 16, 2, 256)
    assert set(model.layers) == {LayerAttention(RopeConfig(1e7, rotary_dim=64))}
    recurrent = frozenset(i for i in range(40) if i % 4 != 3)
    assert model.recurrent == RecurrentConfig(recurrent, 16, 32, 128, 128, 4)
    assert model.experts == ExpertsConfig(256, 8, 512, is_normalized=True, shared_size=512)
    assert model.has_output_gate
    assert model.norm_offset == 1


def test_smollm3() -> None:
    model = read_config(SMOLLM3_3B)
    assert sizes(model) == (36, 2048, 16, 4, 128)
    assert model.tie_word_embeddings
    assert [layer.rope == NO_ROPE for layer in model.layers] == [False, False, False, True] * 9
    assert model.layers[0].rope.theta == 5e6


def test_olmo2() -> None:
    model = read_config(OLMO2_7B)
    assert sizes(model) == (32, 4096, 32, 32, 128)
    assert set(model.layers) == {LayerAttention(RopeConfig(5e5))}


def test_olmo3() -> None:
    model = read_config(OLMO3_7B)
    assert sizes(model) == (32, 4096, 32, 32, 128)
    assert model.max_position_embeddings == 65536
    yarn = RopeConfig(
        5e5, "yarn", 8.0, original_max_position=8192, attention_factor=1.2079441541679836
    )
    local = LayerAttention(RopeConfig(5e5), window=4096)
    assert model.layers == (local, local, local, LayerAttention(yarn)) * 8


def test_granite() -> None:
    model = read_config(GRANITE_2B)
    assert sizes(model) == (40, 2048, 32, 8, 64)
    assert (model.attention_scale, model.embedding_scale) == (1 / 64, 12.0)
    assert (model.embedding_divisor, model.logits_scale) == (0.22, 1 / 8)
    assert model.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)


@pytest.mark.parametrize("name", ["Glm4ForCausalLM", "GlmForCausalLM"])
def test_glm4(name: str) -> None:
    model = read_config({**GLM4_9B, "architectures": [name]})
    assert sizes(model) == (40, 4096, 32, 2, 128)
    assert (model.qkv_bias, model.output_bias) == (True, False)
    rope = RopeConfig(1e4, rotary_dim=64, is_interleaved=True)
    assert set(model.layers) == {LayerAttention(rope)}
    with pytest.raises(CheckpointError, match="rotates 13 of 128"):
        read_config({**GLM4_9B, "partial_rotary_factor": 0.1015625})


def test_gemma2() -> None:
    model = read_config(GEMMA2_2B)
    assert sizes(model) == (26, 2304, 8, 4, 256)
    assert (model.attention_softcap, model.logits_softcap) == (50.0, 30.0)
    assert (model.attention_scale, model.embedding_scale) == (1 / 16, 48.0)
    assert (model.tie_word_embeddings, model.activation) == (True, "gelu_tanh")
    rope = RopeConfig(1e4)
    assert model.layers == (LayerAttention(rope, 4096), LayerAttention(rope)) * 13
    off = read_config({**GEMMA2_2B, "attn_logit_softcapping": None})
    assert (off.attention_softcap, off.logits_softcap) == (None, 30.0)


def test_ministral3() -> None:
    model = read_config(MINISTRAL3_8B)
    assert sizes(model) == (34, 4096, 32, 8, 128)
    assert model.max_position_embeddings == 262144
    rope = RopeConfig(1e6, "yarn", 16.0, original_max_position=16384, q_scaling=0.1)
    assert set(model.layers) == {LayerAttention(rope)}


def test_gemma3_with_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    found = find_checkpoint(str(tmp_path), need_weights=False, need_tokenizer=False)
    assert eos_token_ids(found) == (1, 106)
    model = read_config(found.config)
    assert sizes(model) == (34, 2560, 8, 4, 256)
    assert (model.vocab_size, model.dtype) == (262208, "bfloat16")
    assert model.max_position_embeddings == 131072
    local = LayerAttention(RopeConfig(1e4), window=1024)
    assert model.layers[:6] == (*[local] * 5, LayerAttention(RopeConfig(1e6, "linear", 8.0)))


def test_gpt_oss() -> None:
    assert not stores_quantized(GPT_OSS_20B)
    model = read_config_for(GPT_OSS_20B, "auto")
    assert sizes(model) == (24, 2880, 64, 8, 64)
    assert [layer.window for layer in model.layers] == [128, None] * 12


def sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return the sizes that most published configs differ in."""
    heads = model.num_heads, model.num_kv_heads
    return len(model.layers), model.hidden_size, *heads, model.head_dim
