"""The facts of published config.json files, and what is read from them."""

from __future__ import annotations

from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.config_json import NO_ROPE
from nanovllm.models.registry import read_config

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


def test_smollm3() -> None:
    model = read_config(SMOLLM3_3B)
    assert sizes(model) == (36, 2048, 16, 4, 128)
    assert model.tie_word_embeddings
    assert [layer.rope == NO_ROPE for layer in model.layers] == [False, False, False, True] * 9
    assert model.layers[0].rope.theta == 5e6


def sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return the sizes that most published configs differ in."""
    heads = model.num_heads, model.num_kv_heads
    return model.num_layers, model.hidden_size, *heads, model.head_dim
