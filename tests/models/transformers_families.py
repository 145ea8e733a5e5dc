"""Tiny configs of decoders that transformers implements and we do not."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import checkpoints

SIZES = {
    **checkpoints.SIZES,
    "hidden_size": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
ROUTED_EXPERTS = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"head_dim": 16}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}

# Fields that differ from SIZES, by model_type.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **WINDOWS, **HEADS, "num_experts": 4, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "biogpt": {},  # learned positions
    "bitnet": {},
    "cohere": {},  # scaled logits
    "cohere2": WINDOWS,
    "dots1": {**ROUTED_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5": HEADS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone4": WINDOWS,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": HEADS,
    "gemma3n_text": {
        **{**WINDOWS, **HEADS, **PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 8},
        **{"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]},
    },
    "gemma4_text": {  # layers differ in the number and size of their heads
        **{**WINDOWS, **HEADS, **PER_LAYER, "num_kv_shared_layers": 0},
        **{"global_head_dim": 32, "num_global_key_value_heads": 1},
    },
    "glm4_moe": {**ROUTED_EXPERTS, **HEADS, "first_k_dense_replace": 1},
    "gpt2": {},
    "gpt_bigcode": {},  # one kv head
    "gpt_neox": {},
    "gpt_oss": {**LOCAL_EXPERTS, **WINDOWS, **HEADS, "attn_implementation": "eager"},  # sinks
    "granite_swa": {**WINDOWS, "attn_implementation": "eager"},
    "granitemoe": LOCAL_EXPERTS,
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "mimo_v2_flash": {  # sinks, and values that are smaller than keys
        **{**ROUTED_EXPERTS, **WINDOWS, **HEADS, "v_head_dim": 8, "attn_implementation": "eager"},
    },
    "minimax_m2": {**LOCAL_EXPERTS, **HEADS, "rotary_dim": 8},
    "nanochat": {},  # soft-capped logits
    "nemotron": HEADS,
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phimoe": LOCAL_EXPERTS,
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "seed_oss": HEADS,
    "stablelm": {},
    "starcoder2": {"sliding_window": 20},
    "vaultgemma": {  # SDPA has no softcapping
        **{**WINDOWS, **HEADS, "attn_logit_softcapping": 3.0, "attn_implementation": "eager"},
    },
}
SEEDS = {"cohere2": 1, "gpt2": 1}  # others have nearly equal top logits


def make_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    fields = {**SIZES, **FAMILIES.get(model_type, {}), **changes}
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**fields)
    return config
