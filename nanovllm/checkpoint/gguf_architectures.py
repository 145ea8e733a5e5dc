"""The architectures of GGUF files, each with its Hugging Face class, config and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.config import ConfigJson

# Configs of GGUF files may have this key; config.json never does. If it is set, value head i uses
# key head i % num_key_heads; otherwise, the value heads that share a key head are adjacent.
TILED_HEADS_KEY = "gguf_tiled_value_heads"
_SILU = {"hidden_act": "silu"}
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties that differ between architectures."""

    hf_class: str
    model_type: str
    # GGUF name -> Hugging Face name; "*" is the expert's index if a tensor stacks all experts.
    layer_tensors: Mapping[str, str]
    permuted: tuple[str, ...] = ()  # projections whose rows are stored in interleaved rope order
    norm_offset: float = 0.0  # converters add this to all norm weights except ssm_norm
    # Metadata key -> config field and default value (None: the key is required).
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    biases: Mapping[str, str] = field(default_factory=lambda: _BIASES)  # config field -> tensor
    # Intermediate size if the file has none; None: it is required, 0: there is no dense MLP.
    default_size: int | None = None
    lists_windows: bool = False  # whether files may list the layers with a sliding window
    derive: Callable[[ConfigJson], dict[str, Any]] = lambda config: {}


_QK = ("attn_q", "attn_k")
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **_POST_NORMS,
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_HYBRID_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
_PACKED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERT_NUMBERS = {
    "expert_count": ("num_experts", None),
    "expert_used_count": ("num_experts_per_tok", None),
    "expert_feed_forward_length": ("moe_intermediate_size", None),
}
_DELTA_NET_NUMBERS = {
    "ssm.conv_kernel": ("linear_conv_kernel_dim", None),
    "ssm.state_size": ("linear_key_head_dim", None),
    "ssm.group_count": ("linear_num_key_heads", None),
    "ssm.time_step_rank": ("linear_num_value_heads", None),
    "ssm.inner_size": ("linear_inner_size", None),
    "full_attention_interval": ("full_attention_interval", 4),
    "rope.dimension_count": ("rotary_dim", None),
    "nextn_predict_layers": ("mtp_num_hidden_layers", 0),
}
_WINDOW = {"attention.sliding_window": ("sliding_window", 0)}


def _gemma_scale(config: ConfigJson) -> dict[str, Any]:
    """Return the attention scale, which GGUF does not store; the 27B models have different ones."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == (46 if config["model_type"] == "gemma2" else 62):
        scalar = config["hidden_size"] // (config["num_attention_heads"] or 1)
    return {"query_pre_attn_scalar": scalar}


def _gemma3_fields(config: ConfigJson) -> dict[str, Any]:
    """Return fields that GGUF does not store: the sliding-window pattern and attention scale."""
    return {"sliding_window_pattern": 6 if config["sliding_window"] else 1, **_gemma_scale(config)}


def _mistral3_rope(config: ConfigJson) -> dict[str, Any]:
    if (scaling := config["rope_scaling"]) is None:
        return {}
    factors = {
        "mscale": 1.0,
        "mscale_all_dim": config["mscale_all_dim"],
        "llama_4_scaling_beta": config["llama_4_scaling_beta"],
    }
    return {"rope_scaling": {**scaling, **factors}}


def _rotary_factor(config: ConfigJson) -> dict[str, Any]:
    return {"partial_rotary_factor": (config["rotary_dim"] or 0) / (config["head_dim"] or 1)}


def _delta_net_fields(config: ConfigJson) -> dict[str, Any]:
    """Return derived fields; num_hidden_layers excludes layers for multi-token prediction."""
    num_heads = config["linear_num_value_heads"] or 1
    return {
        **_rotary_factor(config),
        "linear_value_head_dim": config["linear_inner_size"] // num_heads,
        "num_hidden_layers": config["num_hidden_layers"] - (config["mtp_num_hidden_layers"] or 0),
        TILED_HEADS_KEY: True,
    }


def _olmo3_fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of OLMo 3: its files declare olmo2, but also have a sliding window."""
    if not config["sliding_window"]:
        return {}
    scaling = config["rope_scaling"]
    if scaling is not None:  # older converters store the factor under another key
        scaling = {"attention_factor": config["attention_factor"], **scaling}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_scaling": scaling,
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", _NORMS | _ATTENTION | _MLP, permuted=_QK),
    # Qwen2 always has biases on q, k and v, so its config.json has no field for them.
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _NORMS | _ATTENTION | _MLP, biases={}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _NORMS | _ATTENTION | _QK_NORMS | _MLP),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _NORMS | _ATTENTION | _QK_NORMS | _EXPERTS,
        numbers=_EXPERT_NUMBERS,
        constants=_SILU | {"norm_topk_prob": True},
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        _HYBRID_NORMS | _ATTENTION | _QK_NORMS | _DELTA_NET | _MLP,
        norm_offset=1.0,
        numbers=_DELTA_NET_NUMBERS,
        derive=_delta_net_fields,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _HYBRID_NORMS | _ATTENTION | _QK_NORMS | _DELTA_NET | _EXPERTS | _SHARED_EXPERT,
        norm_offset=1.0,
        numbers=_EXPERT_NUMBERS
        | _DELTA_NET_NUMBERS
        | {"expert_shared_feed_forward_length": ("shared_expert_intermediate_size", None)},
        default_size=0,
        derive=_delta_net_fields,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA_NORMS | _ATTENTION | _MLP,
        norm_offset=1.0,
        numbers={
            "attention.sliding_window": ("sliding_window", 4096),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        derive=_gemma_scale,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA_NORMS | _ATTENTION | _QK_NORMS | _MLP,
        norm_offset=1.0,
        numbers=_WINDOW | {"rope.freq_base_swa": ("rope_local_base_freq", 10000.0)},
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        derive=_gemma3_fields,
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        _NORMS | _ATTENTION | _MLP,
        permuted=_QK,
        numbers={
            "attention.temperature_scale": ("llama_4_scaling_beta", 0),
            "rope.scaling.yarn_log_multiplier": ("mscale_all_dim", 0),
        },
        derive=_mistral3_rope,
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", "smollm3", _NORMS | _ATTENTION | _MLP, permuted=_QK
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        _POST_NORMS | _ATTENTION | _QK_NORMS | _MLP,
        numbers=_WINDOW | {"rope.scaling.attn_factor": ("attention_factor", 0)},
        lists_windows=True,
        derive=_olmo3_fields,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        _GLM4_NORMS | _ATTENTION | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        numbers={"rope.dimension_count": ("rotary_dim", None)},
        derive=_rotary_factor,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        _NORMS | _ATTENTION | _MLP,
        permuted=_QK,
        numbers={
            "attention.scale": ("attention_multiplier", 1.0),
            "embedding_scale": ("embedding_multiplier", 1.0),
            "residual_scale": ("residual_multiplier", 1.0),
            "logit_scale": ("logits_scaling", 1.0),
        },
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _NORMS | _PACKED, numbers=_WINDOW, biases={}),
}
