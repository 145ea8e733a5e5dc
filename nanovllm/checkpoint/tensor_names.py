"""The names of tensors in checkpoints of other classes of models, or with stacked experts."""

from __future__ import annotations

import re
from dataclasses import replace

from nanovllm.checkpoint.stored_tensors import StoredTensor

# Tensors of a multimodal model that are not part of its text model.
NOT_TEXT = re.compile(
    r"(model\.)?((audio|vision)_tower|multi_modal_projector|embed_(audio|vision)|visual)\."
)
TEXT_PREFIX = re.compile(r"^(model\.)?language_model\.")
_STACKED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")


def causal_lm_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of the language model, under the names of a class with an LM head."""
    tensors = _text_tensors(tensors)
    if any(tensor.name == "embed_tokens.weight" for tensor in tensors):
        return _add_prefix(tensors)
    return tensors


def split_experts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the weights in a tensor, which may stack all experts."""
    match = _STACKED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return [(name, shape)]
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    part_shape = shape[1] // len(parts), shape[2]
    names = [f"{i}.{part}.weight" for i in range(shape[0]) for part in parts]
    return [(match[1] + each, part_shape) for each in names]


def _text_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the text model's tensors, and remove its prefix from their names.

    The prefix is `language_model.` or, if transformers 5 saved the file, `model.language_model.`,
    which becomes `model.`.
    """
    text = [tensor for tensor in tensors if not NOT_TEXT.match(tensor.name)]
    return [replace(tensor, name=TEXT_PREFIX.sub(r"\1", tensor.name, count=1)) for tensor in text]


def _add_prefix(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Add `model.`, which tensor names lack if a model was saved without its LM head."""
    return [
        tensor
        if tensor.name.startswith("lm_head.")
        else replace(tensor, name=f"model.{tensor.name}")
        for tensor in tensors
    ]
