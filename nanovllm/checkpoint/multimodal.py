"""Extract the text model from a multimodal checkpoint: its config and its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.checkpoint.stored_tensors import StoredTensor

# The architectures of multimodal models, and those of their text models by `model_type`.
MULTIMODAL = [
    [f"{name}ForConditionalGeneration"]
    for name in ("Gemma3", "Gemma3n", "Gemma4", "Mistral3", "Qwen3_5", "Qwen3_5Moe")
]
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
# Tensors that are not part of the text model.
NOT_TEXT = re.compile(
    r"(model\.)?((audio|vision)_tower|multi_modal_projector|embed_(audio|vision)|visual)\."
)
TEXT_PREFIX = re.compile(r"^(model\.)?language_model\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model; return `config` itself if either class is unknown."""
    text, kind = config["text_config"], config.get("architectures")
    if kind not in MULTIMODAL or not isinstance(text, dict):
        return config
    architecture = TEXT_MODELS.get(str(text.get("model_type")))
    if architecture is None:
        return config
    is_part = re.compile("(audio|text|vision)_config").fullmatch
    shared = {name: value for name, value in config.items() if not is_part(name)}
    return {**shared, **text, "architectures": [architecture]}


def text_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the text model's tensors, and remove its prefix from their names.

    The prefix is `language_model.` or, if transformers 5 saved the file, `model.language_model.`,
    which becomes `model.`.
    """
    text = [tensor for tensor in tensors if not NOT_TEXT.match(tensor.name)]
    return [replace(tensor, name=TEXT_PREFIX.sub(r"\1", tensor.name, count=1)) for tensor in text]
