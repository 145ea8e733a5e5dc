"""Choose which weights of a model stay quantized on the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY, block_layouts
from nanovllm.checkpoint.list_tensors import list_weights
from nanovllm.checkpoint.quantization import choose_quantization
from nanovllm.checkpoint.quantized.weight_format import Layouts, QuantLayout, RoundToFp8
from nanovllm.checkpoint.stored_tensors import StoredTensor
from nanovllm.config import EngineConfig
from nanovllm.layers.shards import ExpectedTensor
from nanovllm.models.registry import read_config
from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)


def choose_layouts(
    config: EngineConfig,
    checkpoint: Checkpoint | Mapping[str, Any],
    device: Device,
    dtype: torch.dtype,
) -> Layouts | None:
    """Return the layouts, by module name, of the weights that stay quantized; None if none do.

    Weights stay quantized if kernels support their layout. For dummy weights, and for weights that
    are not downloaded yet, the config determines the layouts.
    """
    checkpoint_config = checkpoint.config if isinstance(checkpoint, Checkpoint) else checkpoint
    is_dummy = config.load_format == "dummy"
    types = checkpoint_config.get(BLOCK_TYPES_KEY)
    if types and not is_dummy and device.reads_quantized("gguf", dtype):
        return block_layouts(types)
    stored = checkpoint_config.get("quantization_config")
    quantization = choose_quantization(config.quantization, stored)
    layout = quantization and quantization.format.layout
    if not quantization or not layout or not device.reads_quantized(layout.kind, dtype):
        return None
    if isinstance(checkpoint, Checkpoint) and not is_dummy:
        tensors = list_weights(checkpoint)
        layouts = {each.name.removesuffix(".weight"): each.layout for each in tensors}
        return lambda module: None if module.endswith("embed_tokens") else layouts.get(module)
    from nanovllm.checkpoint.quantized.combine import is_quantized_to_fp8

    # `round_to_fp8` does not quantize the last down_proj; checkpoints may store it quantized.
    is_chosen_here = isinstance(quantization.format, RoundToFp8)
    num_layers = len(read_config(checkpoint_config).layers) if is_chosen_here else 0

    def expected_layout(module: str) -> QuantLayout | None:
        is_projection = is_quantized_to_fp8(f"{module}.weight", num_layers)
        return layout if is_projection and not quantization.ignores(module) else None

    return expected_layout


def log_dequantized(tensors: list[StoredTensor], expected: dict[str, ExpectedTensor]) -> None:
    """Log how many quantized weights are dequantized, and so use more memory than in the file."""
    stored = [tensor.name for tensor in tensors if tensor.read_quantized is not None]
    dense = [name for name in stored if not expected[name].is_quantized]
    if not dense:
        return
    target = expected[dense[0]].parts[0].target
    assert isinstance(target, Tensor)
    dtype = str(target.dtype).removeprefix("torch.")
    which = "" if len(dense) == len(stored) else f", such as {dense[0]},"
    text = "%d of %d quantized weights%s are dequantized to %s: this device has no kernel for them"
    logger.info(text, len(dense), len(stored), which, dtype)
