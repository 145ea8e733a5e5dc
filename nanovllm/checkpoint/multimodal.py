"""Extract the config of the text model from that of a multimodal model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.config import ConfigJson

# The architectures of multimodal models, and whether transformers ties their embeddings by default.
IS_TIED = {
    **dict.fromkeys(("Gemma3", "Gemma3n", "Gemma4", "Mistral3"), True),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe"), False),
}
# The architectures of their text models by `model_type`.
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text"), "Qwen2ForCausalLM"),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), "Qwen2ForCausalLM"),
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
ROPES = ("rope_parameters", "rope_scaling")


def text_config(config: ConfigJson) -> ConfigJson:
    """Return the config of the text model; return `config` itself if either class is unknown."""
    names, text = config.get("architectures"), config.get("text_config")
    text = config if text is None else text  # Qwen2-VL and 2.5 are published without text_config
    kind = next((each for each in IS_TIED if names == [f"{each}ForConditionalGeneration"]), None)
    if kind is None or not isinstance(text, Mapping):
        return config
    architecture = TEXT_MODELS.get(str(text.get("model_type")))
    if architecture is None:
        return config
    is_part = re.compile("(audio|text|vision)_config").fullmatch
    merged = {key: value for key, value in {**config, **text}.items() if not is_part(key)}
    is_tied = config.get("tie_word_embeddings", IS_TIED[kind]) or text.get("tie_word_embeddings")
    rope = {key: _text_rope(merged[key]) for key in ROPES if isinstance(merged.get(key), Mapping)}
    return {
        **merged,
        **rope,
        "architectures": [architecture],
        "tie_word_embeddings": is_tied or False,
    }


def _text_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Replace multimodal RoPE: a text token has the same position in all of its sections."""
    kind = rope.get("rope_type") or rope.get("type")
    return {**rope, "type": "default", "rope_type": "default"} if kind == "mrope" else {**rope}
