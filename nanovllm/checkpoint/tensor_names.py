"""Rename the tensors of checkpoints that were saved from a larger or a smaller class of model."""

from __future__ import annotations

import re
from dataclasses import replace

from nanovllm.checkpoint.stored_tensors import StoredTensor

# Tensors of a multimodal model that are not part of its text model.
NOT_TEXT = re.compile(
    r"(model\.)?((audio|vision)_tower|multi_modal_projector|embed_(audio|vision)|visual)\."
)
TEXT_PREFIX = re.compile(r"^(model\.)?language_model\.")


def causal_lm_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of the language model, under the names of a class with an LM head."""
    tensors = _text_tensors(tensors)
    if any(tensor.name == "embed_tokens.weight" for tensor in tensors):
        return _add_prefix(tensors)
    return tensors


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
