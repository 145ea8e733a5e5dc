"""The architectures of GGUF files, each with its Hugging Face class, config and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SILU = {"hidden_act": "silu"}
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties that differ between architectures."""

    hf_class: str
    model_type: str
    # GGUF name -> Hugging Face name; "*" stands for the index in a tensor that stacks all experts.
    layer_tensors: Mapping[str, str]
    permuted: tuple[str, ...] = ()  # projections whose rows are stored in interleaved rope order
    norm_offset: float = 0.0  # converters add this to the weights of all norms
    # Metadata key -> config field and default value (None: the key is required).
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    biases: Mapping[str, str] = field(default_factory=lambda: _BIASES)  # config field -> tensor
    derive: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
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
_PACKED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_WINDOW = {"attention.sliding_window": ("sliding_window", 0)}


def _gemma3_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that GGUF does not store: the sliding-window pattern and attention scale."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == 62:
        scalar = config["hidden_size"] // (config["num_attention_heads"] or 1)
    period = 6 if config["sliding_window"] else 1
    return {"sliding_window_pattern": period, "query_pre_attn_scalar": scalar}


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", _NORMS | _ATTENTION | _MLP, permuted=("attn_q", "attn_k")
    ),
    # Qwen2 always has biases on q, k and v, so its config.json has no field for them.
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _NORMS | _ATTENTION | _MLP, biases={}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _NORMS | _ATTENTION | _QK_NORMS | _MLP),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _NORMS | _ATTENTION | _QK_NORMS | _EXPERTS,
        numbers={
            "expert_count": ("num_experts", None),
            "expert_used_count": ("num_experts_per_tok", None),
            "expert_feed_forward_length": ("moe_intermediate_size", None),
        },
        constants=_SILU | {"norm_topk_prob": True},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA_NORMS | _ATTENTION | _QK_NORMS | _MLP,
        norm_offset=1.0,
        numbers=_WINDOW | {"rope.freq_base_swa": ("rope_local_base_freq", 10000.0)},
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        derive=_gemma3_layers,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _NORMS | _PACKED, numbers=_WINDOW, biases={}),
}
