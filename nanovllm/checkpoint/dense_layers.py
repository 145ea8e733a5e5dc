"""Load the linear layers that an embedding model applies to its pooled vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.list_tensors import list_tensors
from nanovllm.errors import CheckpointError


def load_dense(
    folders: Sequence[Path], hidden_size: int, device: torch.device
) -> Iterator[nn.Linear]:
    """Load linear layers from sentence-transformers folders; like pooling, they run in float32."""
    width = hidden_size
    for folder in folders:
        stored = list_tensors(find_checkpoint(str(folder)))
        weights = {
            tensor.name.removeprefix("linear."): torch.cat([*tensor.read()]).to(device).float()
            for tensor in stored
        }
        if not {"weight"} <= weights.keys() <= {"weight", "bias"}:
            names = ", ".join(tensor.name for tensor in stored)
            raise CheckpointError(
                f"{folder} must hold linear.weight and optionally linear.bias, not {names}"
            )
        num_outputs, num_inputs = weights["weight"].shape
        if num_inputs != width:
            raise CheckpointError(f"{folder}: linear.weight has {num_inputs} inputs, not {width}")
        layer = nn.Linear(num_inputs, num_outputs, bias="bias" in weights, device=device)
        layer.load_state_dict(weights)
        yield layer
        width = num_outputs
