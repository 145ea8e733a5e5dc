"""Strict weight loading: every parameter is filled once, and every tensor must be expected."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY
from nanovllm.checkpoint.quantization import QuantLayout, choose_quantization
from nanovllm.checkpoint.stored_tensors import StoredTensor, list_tensors
from nanovllm.config import EngineConfig
from nanovllm.errors import CheckpointError
from nanovllm.layers.build import Layer
from nanovllm.layers.layer_weight import Layouts
from nanovllm.layers.shards import ExpectedTensor
from nanovllm.models.registry import read_config
from nanovllm.ops.quantized_weight import QuantizedRows
from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)

NUM_READERS = 2  # threads: one reads while the other's copy runs, which torch parallelizes
MAX_NAMED = 5  # problems listed in an error
# Some exporters write these: RoPE frequencies, which the config implies, and a tied embedding.
IGNORED = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight")


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, device: Device, show_progress: bool = True
) -> None:
    """Fill every parameter and pack every layer; raise for missing, extra or misshapen tensors."""
    start = time.perf_counter()
    layers = UnpackedLayers(model, device)
    expected = layers.expected
    stored, quantization = list_tensors(checkpoint), checkpoint.quantization
    if quantization is not None:
        from nanovllm.checkpoint.quantized.modules import join_parts

        stored = join_parts(stored, quantization, expected)
    tensors = _match(stored, expected, checkpoint.path)
    if show_progress:
        _log_dequantized(tensors, expected)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    # None lets tqdm hide the bar unless stderr is a terminal; stderr may also be closed.
    is_hidden = None if show_progress and sys.stderr is not None else True
    options = {"unit": "B", "unit_scale": True, "disable": is_hidden, "leave": False}
    with tqdm(total=num_bytes, desc="Loading weights", **options) as progress:
        for name in _fill_all(tensors, expected, device):
            progress.update(expected[name].nbytes)
            layers.loaded(name)
    layers.pack_rest()
    device.release()  # read buffers, and weights that packing replaced
    seconds = time.perf_counter() - start
    speed = num_bytes / 1e9 / seconds
    logger.info("Loaded %.2f GB of weights in %.1f s, %.1f GB/s", num_bytes / 1e9, seconds, speed)


def fill_dummy_weights(model: nn.Module, device: Device, seed: int) -> None:
    """Fill matrices with small random numbers and norms with ones, for benchmarks and tests."""
    layers = UnpackedLayers(model, device)
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    for name in list(layers.expected):
        _fill_randomly(layers.expected[name], generator, device)
        layers.loaded(name)
    layers.pack_rest()


def _fill_randomly(expected: ExpectedTensor, generator: torch.Generator, device: Device) -> None:
    target = expected.parts[0].target
    if isinstance(target, QuantizedRows):
        whole = torch.empty(expected.shape, device=device.torch_device)
        whole.normal_(generator=generator)
        for part in expected.parts:
            assert isinstance(part.target, QuantizedRows)
            part.target.put_random(whole[part.source])
        return
    # Draw the unsharded tensor, so that the model does not depend on the number of ranks.
    tensor = target if target.shape == expected.shape else target.new_empty(expected.shape)
    if tensor.dim() == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, 0.02, generator=generator)
    if tensor is not target:
        for part in expected.parts:
            assert isinstance(part.target, Tensor)
            part.target.copy_(tensor[part.source])


class UnpackedLayers:
    """Layers of a model that is being loaded: each is packed once its tensors are complete.

    Packing frees the weights it replaces, so at most one layer takes memory twice.
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
        self._has_room = device.has_room_for_copy(num_bytes)

    def loaded(self, name: str) -> None:
        """Record that a tensor is loaded; pack its layer if that was the last one."""
        del self.expected[name]  # it refers to the weights that packing replaces
        layer = self._layer_of[name]
        self._num_missing[layer] -= 1
        if self._num_missing[layer] == 0:
            self._pack(layer)

    def pack_rest(self) -> None:
        """Pack the layers that have no tensors of their own, such as a tied LM head."""
        for layer in list(self._num_missing):
            self._pack(layer)

    def _pack(self, layer: Layer) -> None:
        num_missing = self._num_missing.pop(layer)
        assert num_missing == 0, f"{num_missing} tensors are missing"
        layer.pack(self._has_room)


def named_layers(model: nn.Module) -> list[tuple[str, Layer]]:
    modules = model.named_modules()
    return [(path, module) for path, module in modules if isinstance(module, Layer)]


def _log_dequantized(tensors: list[StoredTensor], expected: dict[str, ExpectedTensor]) -> None:
    """Log which quantized weights are dequantized, because they take more memory than the file."""
    stored = [tensor.name for tensor in tensors if tensor.read_quantized is not None]
    dense = [name for name in stored if not expected[name].is_quantized]
    if not dense:
        return
    target = expected[dense[0]].parts[0].target
    assert isinstance(target, Tensor)
    dtype = str(target.dtype).removeprefix("torch.")
    which = "" if len(dense) == len(stored) else f", such as {dense[0]},"
    text = "%d of %d quantized weights%s are dequantized to %s: no kernel here supports them"
    logger.info(text, len(dense), len(stored), which, dtype)


def _match(
    tensors: list[StoredTensor], expected: dict[str, ExpectedTensor], path: Path
) -> list[StoredTensor]:
    """Return the expected tensors; raise CheckpointError if any are extra, misshapen or missing."""
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
            if isinstance(piece, Tensor):
                assert isinstance(target, Tensor)
                device.fill(target[first : first + len(piece)], piece)
            else:
                assert isinstance(target, QuantizedRows)
                target.put(first, piece.values, piece.scales, piece.zeros, device.fill)
            first += len(piece)
        assert first == len(target), f"{tensor.name}: {first} of {len(target)} rows"
    return tensor.name


def choose_layouts(
    config: EngineConfig,
    checkpoint: Checkpoint | Mapping[str, Any],
    device: Device,
    dtype: torch.dtype,
) -> Layouts | None:
    """Return the layouts of the weights that stay quantized because kernels support them.

    Before the checkpoint is downloaded, and for dummy weights, they follow from its config.
    """
    checkpoint_config = checkpoint.config if isinstance(checkpoint, Checkpoint) else checkpoint
    is_dummy = config.load_format == "dummy"
    types = checkpoint_config.get(BLOCK_TYPES_KEY)
    if types and not is_dummy and device.reads_quantized("gguf", dtype):
        return _gguf_layouts(types)
    stored = checkpoint_config.get("quantization_config")
    if stored is None and config.quantization is None:
        return None
    quantization = choose_quantization(config.quantization, stored)
    layout = None if quantization is None else quantization.layout
    if quantization is None or layout is None or not device.reads_quantized(layout.kind, dtype):
        return None
    from nanovllm.checkpoint.quantized.modules import is_quantized_to_fp8, join_parts

    if isinstance(checkpoint, Checkpoint) and not is_dummy:
        tensors = join_parts(list_tensors(checkpoint), quantization, ())
        found = {tensor.name.removesuffix(".weight"): tensor.layout for tensor in tensors}
        return {name: found[name] for name in found if not name.endswith("embed_tokens")}.get

    # Quantizing to FP8 here skips the last projection; a quantized checkpoint may include it.
    is_chosen_here = quantization.scheme == "round_to_fp8"
    num_layers = len(read_config(checkpoint_config).layers) if is_chosen_here else 0

    def expected_layout(module: str) -> QuantLayout | None:
        is_projection = is_quantized_to_fp8(f"{module}.weight", num_layers)
        return layout if is_projection and not quantization.ignores(module) else None

    return expected_layout


def _gguf_layouts(types: Mapping[str, str]) -> Layouts:
    """Map modules to layouts, given the GGUF type of each tensor; one tensor holds all experts."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    layouts = {
        kind: QuantLayout(kind, size, block_bytes=num_bytes)
        for kind in set(types.values())
        for size, num_bytes in [GGML_QUANT_SIZES[GGMLQuantizationType[kind]]]
    }

    def layout_of(module: str) -> QuantLayout | None:
        kind = types.get(re.sub(r"experts\.\d+\.", "experts.*.", f"{module}.weight"))
        return None if kind is None else layouts[kind]

    return layout_of
