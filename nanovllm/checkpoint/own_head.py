"""Find out whether a checkpoint whose config ties the LM head to the embedding has both."""

from __future__ import annotations

import torch

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint stores an LM head that differs from its embedding."""
    if checkpoint.is_gguf:
        return False  # its config is derived from its tensors
    stored = {tensor.name: tensor for tensor in list_tensors(checkpoint)}
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return False
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return True
    pairs = zip(head.read(), embedding.read(), strict=True)
    return not all(torch.equal(*pair) for pair in pairs)
