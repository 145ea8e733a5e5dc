"""Strict weight loading: every parameter filled exactly once, every tensor accounted for."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.weights import StoredTensor, list_tensors
from nanovllm.errors import CheckpointError
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.shards import WeightSlot
from nanovllm.platforms.base import Platform

logger = logging.getLogger(__name__)

NUM_READERS = 2  # one reads while the other's copy runs; torch's threads share each
MAX_NAMED = 5  # problems that an error spells out
# Written by some exporters, derived from the config by everyone.
IGNORED = re.compile(r".*rotary_emb\.inv_freq$")


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, platform: Platform, show_progress: bool = True
) -> None:
    """Copy what has a slot of every tensor; missing, extra and odd shapes raise."""
    start = time.perf_counter()
    slots, tied = weight_slots(model), tied_slots(model)
    found = _match(list_tensors(checkpoint), slots, tied, checkpoint.path)
    tensors = [tensor for tensor in found if tensor.name in slots]
    num_bytes = sum(slot.nbytes for slot in slots.values())
    # None: where there is no terminal; a closed stderr is none at all.
    is_hidden = None if show_progress and sys.stderr is not None else True
    options = {"unit": "B", "unit_scale": True, "disable": is_hidden, "leave": False}
    with tqdm(total=num_bytes, desc="Loading weights", **options) as progress:
        for num_copied in _fill_all(tensors, slots, platform):
            progress.update(num_copied)
    for tensor in found:
        if tensor.name in tied:
            _check_copy(tensor, tied[tensor.name])
    seconds = time.perf_counter() - start
    speed = num_bytes / 1e9 / seconds
    logger.info("Loaded %.2f GB of weights in %.1f s, %.1f GB/s", num_bytes / 1e9, seconds, speed)


def fill_dummy_weights(model: nn.Module, seed: int) -> None:
    """Small random matrices and norms of one: shapes and speed of the real thing, no download."""
    slots = list(weight_slots(model).values())
    generator = torch.Generator(slots[0].parts[0].view.device).manual_seed(seed)
    for slot in slots:
        view = slot.parts[0].view
        # Drawn whole, so that every number of ranks has the same model.
        tensor = view if view.shape == slot.shape else view.new_empty(slot.shape)
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        if tensor is not view:
            for part in slot.parts:
                part.view.copy_(tensor[part.index])


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Map every checkpoint name the model expects to its place."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if hasattr(module, "weight_slots"):
            slots.update(module.weight_slots(path))
    return slots


def tied_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Map names that a checkpoint may repeat to the place that another weight fills."""
    heads = [(path, m) for path, m in model.named_modules() if isinstance(m, LMHead)]
    return {name: slot for path, head in heads for name, slot in head.tied_slots(path).items()}


def _match(
    tensors: list[StoredTensor],
    slots: dict[str, WeightSlot],
    tied: dict[str, WeightSlot],
    path: Path,
) -> list[StoredTensor]:
    """Return the tensors that have a slot each; name what is extra, odd or missing."""
    places = slots | tied
    found: dict[str, StoredTensor] = {}
    problems = []
    for tensor in tensors:
        if IGNORED.match(tensor.name):
            continue
        if problem := _problem(tensor, places, found):
            problems.append(f"{tensor.file}: tensor {tensor.name!r} {problem}")
        found.setdefault(tensor.name, tensor)
    problems += [f"{path}: tensor {name!r} is missing" for name in slots if name not in found]
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise CheckpointError("; ".join(problems[:MAX_NAMED]) + more)
    return list(found.values())


def _problem(
    tensor: StoredTensor, slots: dict[str, WeightSlot], found: dict[str, StoredTensor]
) -> str | None:
    if tensor.name not in slots:
        return "has no place in the model"
    if tensor.name in found:
        return f"appears twice, also in {found[tensor.name].file}"
    expected = slots[tensor.name].shape
    if tensor.shape != expected:
        return f"has shape {list(tensor.shape)}, expected {list(expected)}"
    return None


def _fill_all(
    tensors: list[StoredTensor], slots: dict[str, WeightSlot], platform: Platform
) -> Iterator[int]:
    """Copy all tensors; yield the bytes of each that is done."""
    with ThreadPoolExecutor(NUM_READERS) as readers:
        yield from readers.map(partial(_fill, slots=slots, platform=platform), tensors)


@torch.inference_mode()  # threads do not inherit the mode
def _fill(tensor: StoredTensor, slots: dict[str, WeightSlot], platform: Platform) -> int:
    slot = slots[tensor.name]
    for view, rows in _pieces(tensor, slot):
        platform.fill(view, rows)
    return slot.nbytes


def _check_copy(tensor: StoredTensor, slot: WeightSlot) -> None:
    """Refuse a second copy of a tied weight that differs from the first: one of them is wrong."""
    if not all(torch.equal(view, rows.to(view)) for view, rows in _pieces(tensor, slot)):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} differs from the embedding, which "
            "tie_word_embeddings in config.json says it equals; set that to false to use it"
        )


def _pieces(tensor: StoredTensor, slot: WeightSlot) -> Iterator[tuple[Tensor, Tensor]]:
    """Read a tensor; yield some lines of its place, and what belongs there."""
    for part in slot.parts:
        first = 0
        for rows in tensor.read(part.index):
            yield part.view[first : first + len(rows)], rows
            first += len(rows)
        assert first == len(part.view), f"{tensor.name}: {first} of {len(part.view)} rows"
