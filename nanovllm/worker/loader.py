"""Strict weight loading: fill every parameter once; reject extra tensors unless IGNORED."""

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

from nanovllm.checkpoint.find import Checkpoint, stores_quantized
from nanovllm.checkpoint.list_tensors import list_weights
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.errors import CheckpointError
from nanovllm.layers.build import Layer
from nanovllm.layers.shards import ExpectedTensor
from nanovllm.ops.quantized_weight import QuantizedRows
from nanovllm.worker.device_interface import Device
from nanovllm.worker.quantized_layouts import log_dequantized

logger = logging.getLogger(__name__)

NUM_READERS = 2  # reader threads: one reads a file while the other copies a tensor
MAX_NAMED = 5  # maximum number of problems listed in an error
# Tensors that some exporters write but that are not needed: RoPE frequencies (implied by the
# config), a tied LM head, and the layers for multi-token prediction.
IGNORED = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight|mtp\..*")


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, device: Device, show_progress: bool = True
) -> None:
    """Load and process all weights; raise for missing or extra tensors and wrong shapes."""
    start = time.perf_counter()
    layers = LoadingLayers(model, device)
    expected = layers.expected
    tensors = _match(list_weights(checkpoint, expected), expected, checkpoint.path)
    if show_progress and stores_quantized(checkpoint.config):
        log_dequantized(tensors, expected)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    # With None, tqdm hides the bar unless stderr is a terminal. sys.stderr is None if closed.
    is_hidden = None if show_progress and sys.stderr is not None else True
    options = {"unit": "B", "unit_scale": True, "disable": is_hidden, "leave": False}
    with tqdm(total=num_bytes, desc="Loading weights", **options) as progress:
        for name in _fill_all(tensors, expected, device):
            progress.update(expected[name].nbytes)
            layers.loaded(name)
    layers.process_rest()
    device.release()  # free read buffers, and weights that processing replaced
    seconds = time.perf_counter() - start
    speed = num_bytes / 1e9 / seconds
    logger.info("Loaded %.2f GB of weights in %.1f s, %.1f GB/s", num_bytes / 1e9, seconds, speed)


class LoadingLayers:
    """The layers of a model; each processes its weights as soon as all its tensors are loaded.

    Unless a second copy is allowed, processing frees the weights it replaces. So at most one
    layer's weights are in memory twice.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        self.expected: dict[str, ExpectedTensor] = {}  # tensors not loaded yet, keyed by name
        self._layer_of: dict[str, Layer] = {}
        self._num_missing: dict[Layer, int] = {}
        for path, layer in named_layers(model):
            tensors = layer.expected_tensors(path)
            self.expected |= tensors
            self._layer_of |= dict.fromkeys(tensors, layer)
            self._num_missing[layer] = len(tensors)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._allow_copy = device.has_room_for_copy(num_bytes)

    def loaded(self, name: str) -> None:
        """Record that a tensor is loaded; if it was its layer's last one, process the layer."""
        del self.expected[name]  # drop the reference to a weight that processing may replace
        layer = self._layer_of[name]
        self._num_missing[layer] -= 1
        if self._num_missing[layer] == 0:
            self._process(layer)

    def process_rest(self) -> None:
        """Process the layers that have no tensors of their own, such as a tied LM head."""
        for layer in list(self._num_missing):
            self._process(layer)

    def _process(self, layer: Layer) -> None:
        num_missing = self._num_missing.pop(layer)
        assert num_missing == 0, f"{num_missing} tensors are missing"
        layer.process_weights_after_loading(self._allow_copy)


def named_layers(model: nn.Module) -> list[tuple[str, Layer]]:
    modules = model.named_modules()
    return [(path, module) for path, module in modules if isinstance(module, Layer)]


def _match(
    tensors: list[StoredTensor], expected: dict[str, ExpectedTensor], path: Path
) -> list[StoredTensor]:
    """Return the tensors to load; raise CheckpointError for missing, extra or invalid ones."""
    found: dict[str, StoredTensor] = {}
    problems = []
    for tensor in tensors:
        if tensor.name not in expected and IGNORED.fullmatch(tensor.name):
            continue
        if problem := _problem(tensor, expected, found):
            problems.append(f"{tensor.file}: tensor {tensor.name!r} {problem}")
        found.setdefault(tensor.name, tensor)
    problems += [f"{path}: tensor {name!r} is missing" for name in expected if name not in found]
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise CheckpointError("; ".join(problems[:MAX_NAMED]) + more)
    return list(found.values())


def _problem(
    tensor: StoredTensor, expected: dict[str, ExpectedTensor], found: dict[str, StoredTensor]
) -> str | None:
    if tensor.name not in expected:
        return "is not part of the model"
    if tensor.name in found:
        return f"appears twice, also in {found[tensor.name].file}"
    shape = expected[tensor.name].shape
    if tensor.shape != shape:
        return f"has shape {list(tensor.shape)}, expected {list(shape)}"
    return None


def _fill_all(
    tensors: list[StoredTensor], expected: dict[str, ExpectedTensor], device: Device
) -> Iterator[str]:
    """Copy all tensors; yield the name of each one when it is loaded."""
    with ThreadPoolExecutor(NUM_READERS) as readers:
        yield from readers.map(partial(_fill, expected=expected, device=device), tensors)


@torch.inference_mode()  # reader threads do not inherit the mode
def _fill(tensor: StoredTensor, expected: dict[str, ExpectedTensor], device: Device) -> str:
    wanted = expected[tensor.name]
    read = tensor.read_quantized if wanted.is_quantized else tensor.read
    assert read is not None, f"{tensor.name} is not quantized"
    for part in wanted.parts:
        target, first = part.target, 0
        for piece in read(part.source):
            rows = target[first : first + len(piece)]
            if isinstance(piece, Tensor):
                assert isinstance(rows, Tensor)
                device.fill(rows, piece)
            else:
                assert isinstance(rows, QuantizedRows)
                rows.put(piece, device.fill)
            first += len(piece)
        assert first == len(target), f"{tensor.name}: {first} of {len(target)} rows"
    return tensor.name
