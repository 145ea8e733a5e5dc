"""Which format a checkpoint's weights are kept in: as they are stored, where kernels read that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.checkpoint.gguf import BLOCK_TYPES_KEY
from nanovllm.config import EngineConfig
from nanovllm.layers.plain_format import PLAIN
from nanovllm.layers.weight_format import WeightFormat
from nanovllm.platforms.base import Platform


def choose_weight_format(
    config: EngineConfig,
    checkpoint_config: Mapping[str, Any],
    platform: Platform,
    dtype: torch.dtype,
) -> WeightFormat:
    """Keep the quantised weights of a GGUF file as they are stored where kernels read them."""
    types = checkpoint_config.get(BLOCK_TYPES_KEY)
    if not types or config.load_format == "dummy" or not platform.reads_blocks(dtype):
        return PLAIN
    from nanovllm.layers.gguf_format import GGUFFormat  # needs numba

    return GGUFFormat(types)
