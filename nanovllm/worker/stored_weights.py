"""Which format a checkpoint's weights are kept in: as they are stored, where kernels read that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY
from nanovllm.checkpoint.quantised.modules import widen_all
from nanovllm.checkpoint.quantised.round_to_fp8 import is_rounded
from nanovllm.checkpoint.weights import list_tensors
from nanovllm.config import EngineConfig
from nanovllm.devices.base import Device
from nanovllm.layers.code_format import CodeFormat
from nanovllm.layers.plain_format import PLAIN
from nanovllm.layers.weight_format import WeightFormat
from nanovllm.models.registry import read_config
from nanovllm.quantisation import CodeLayout, choose_quantisation


def choose_weight_format(
    config: EngineConfig,
    checkpoint: Checkpoint | Mapping[str, Any],
    device: Device,
    dtype: torch.dtype,
) -> WeightFormat:
    """Keep quantised weights as they are stored where kernels read them.

    Before a checkpoint is there, and for random weights, its config says what is stored.
    """
    checkpoint_config = checkpoint.config if isinstance(checkpoint, Checkpoint) else checkpoint
    types = checkpoint_config.get(BLOCK_TYPES_KEY)
    if types and config.load_format != "dummy" and device.reads_blocks(dtype):
        from nanovllm.layers.gguf_format import GGUFFormat  # needs numba

        return GGUFFormat(types)
    stored = checkpoint_config.get("quantization_config")
    quantisation = choose_quantisation(config.quantization, stored)
    layout = None if quantisation is None else quantisation.layout
    if quantisation is None or layout is None or not device.reads_codes(layout.kind, dtype):
        return PLAIN
    if isinstance(checkpoint, Checkpoint) and config.load_format != "dummy":
        return CodeFormat(_stored_layouts(checkpoint).get)

    # A checkpoint that is quantised already may have all of them so.
    is_chosen_here = quantisation.scheme == "round_to_fp8"
    num_layers = len(read_config(checkpoint_config).layers) if is_chosen_here else 0

    def expected_layout(module: str) -> CodeLayout | None:
        is_projection = is_rounded(f"{module}.weight", num_layers)
        return layout if is_projection and not quantisation.ignores(module) else None

    return CodeFormat(expected_layout)


def _stored_layouts(checkpoint: Checkpoint) -> dict[str, CodeLayout]:
    """How the modules of a checkpoint are stored, those that are quantised."""
    assert checkpoint.quantisation is not None
    tensors = widen_all(list_tensors(checkpoint), checkpoint.quantisation, ())
    return {
        tensor.name.removesuffix(".weight"): tensor.layout
        for tensor in tensors
        if tensor.layout is not None
    }
