"""Strict weight loading: every parameter filled exactly once, every tensor accounted for."""

from __future__ import annotations

import logging
import pickle
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf import iter_tensors as iter_gguf
from nanovllm.errors import CheckpointError
from nanovllm.layers.embed_head import LMHead

logger = logging.getLogger(__name__)

# Written by some exporters, derived from the config by everyone.
IGNORED = re.compile(r".*rotary_emb\.inv_freq$")


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy every tensor of the checkpoint into its slot; missing, extra and odd shapes raise."""
    slots = weight_slots(model)
    missing = dict.fromkeys(slots)
    ignored = tied_names(model)
    start = time.perf_counter()
    progress = tqdm(total=len(slots), desc="Loading weights", disable=None, leave=False)
    with progress:
        for name, tensor in iter_tensors(checkpoint):
            if name in ignored or IGNORED.match(name):
                continue
            if name not in slots:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name!r} has no place in the model"
                )
            if name not in missing:
                raise CheckpointError(f"{checkpoint.path}: tensor {name!r} appears twice")
            _fill(slots[name], tensor, name, checkpoint.path)
            del missing[name]
            progress.update()
    if missing:
        names = ", ".join(list(missing)[:5])
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} tensors are missing: {names}")
    num_bytes = sum(slot.nbytes for slot in slots.values())
    seconds = time.perf_counter() - start
    logger.info("Loaded %.2f GB of weights in %.1f s", num_bytes / 1e9, seconds)


def fill_dummy_weights(model: nn.Module, seed: int) -> None:
    """Small random matrices and norms of one: shapes and speed of the real thing, no download."""
    slots = weight_slots(model).values()
    generator = torch.Generator(next(iter(slots)).device).manual_seed(seed)
    for slot in slots:
        if slot.dim() == 1:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)


def weight_slots(model: nn.Module) -> dict[str, Tensor]:
    """Map every checkpoint name the model expects to the view it is copied into."""
    slots: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if hasattr(module, "weight_slots"):
            slots.update(module.weight_slots(path))
    return slots


def tied_names(model: nn.Module) -> set[str]:
    """Names that a checkpoint may repeat although another weight already holds them."""
    heads = [(path, m) for path, m in model.named_modules() if isinstance(m, LMHead)]
    return {f"{path}.weight" for path, head in heads if head.is_tied}


def iter_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    if checkpoint.weight_format == "gguf":
        for path in checkpoint.weight_files:
            for name, array in iter_gguf(path):
                yield name, torch.from_numpy(array)
        return
    read = _iter_safetensors if checkpoint.weight_format == "safetensors" else _iter_bin
    for path in checkpoint.weight_files:
        yield from read(path)


def _iter_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _iter_bin(path: Path) -> Iterator[tuple[str, Tensor]]:
    is_zip = zipfile.is_zipfile(path)  # the format before torch 1.6 cannot be memory-mapped
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not a readable PyTorch checkpoint: {error}") from error
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise CheckpointError(f"{path} must hold a dict of tensors, a state dict")
    yield from tensors.items()


def _fill(slot: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if slot.shape != tensor.shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(slot.shape)}"
        )
    slot.copy_(tensor)
