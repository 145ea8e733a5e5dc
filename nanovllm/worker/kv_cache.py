"""The size and layout of the KV cache, defined only here."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.executor import Windows
from nanovllm.layers.shards import split_kv_heads
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's keys and values are: in which group's blocks, and in which of their rows."""

    group: int
    row: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How layers are split into groups, which have a block table each.

    A block has `num_rows` rows, each with the keys and values of one layer of the group that holds
    the block. So the blocks of all groups have the same size.
    """

    windows: Windows
    places: tuple[Place, ...]  # one per layer that has a cache
    num_rows: int


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV cache: k and v of a row are [num_blocks, block_size, kv_heads, head_dim].

    An FP8 cache also has an exponent for k and one for v, per token and head. The exponents of all
    rows are stored after the keys and values of all rows.
    """

    groups: LayerGroups
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        num_heads = 2 * self.groups.num_rows * self.block_size * self.num_kv_heads
        return num_heads * (self.head_dim * self.dtype.itemsize + self.has_exponents)

    @property
    def has_exponents(self) -> bool:
        return self.dtype == FP8

    def views(self, buffer: Tensor, num_blocks: int) -> list[LayerCache]:
        """Split a byte buffer of num_blocks * block_bytes into per-layer caches."""
        shape = (self.groups.num_rows, 2, num_blocks, self.block_size, self.num_kv_heads)
        num_bytes = math.prod(shape) * self.head_dim * self.dtype.itemsize
        rows = buffer[:num_bytes].view(self.dtype).view(*shape, self.head_dim)
        if self.has_exponents:
            exponents = buffer[num_bytes:].view(*shape[:3], *shape[:2:-1])
            by_row = [LayerCache(*row, *each) for row, each in zip(rows, exponents, strict=True)]
        else:
            by_row = [LayerCache(*row) for row in rows]
        return [replace(by_row[place.row], group=place.group) for place in self.groups.places]


def kv_cache_spec(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    group: TPGroup,
    target: ModelConfig | None = None,
) -> KVCacheSpec:
    """Describe the KV cache of a model; a draft model's layers join the groups of its target."""
    num_kv_heads = split_kv_heads(model.num_kv_heads, group).count
    if config.kv_cache_dtype != "auto":
        dtype = FP8
    if target is None:
        groups = split_layers(model)
    else:
        groups = join_groups(model, split_layers(target).windows)
    return KVCacheSpec(groups, config.kvcache_block_size, num_kv_heads, model.head_dim, dtype)


def split_layers(model: ModelConfig) -> LayerGroups:
    """Split layers with the same window into groups of about equal size, full attention first.

    A group has as many layers as the rarest kind, unless all kinds are almost equally frequent:
    then each kind is a group, and the smaller ones leave rows of their blocks empty.
    """
    windows = _layer_windows(model)
    counts = Counter(windows.values())
    least, most = min(counts.values()), max(counts.values())
    size = most if 2 * most < 3 * least else least
    groups: list[int | None] = []
    for window in sorted(counts, key=lambda window: window or 0):
        groups += [window] * -(-counts[window] // size)
    return _place_layers(model, windows, groups, size)


def join_groups(model: ModelConfig, groups: Windows) -> LayerGroups:
    """Put each layer into the first group with its window.

    Layers without such a group get full attention; if there is no group for it, one is added.
    """
    windows = {
        layer: window if window in groups else None
        for layer, window in _layer_windows(model).items()
    }
    missing = [] if None in groups or None not in windows.values() else [None]
    return _place_layers(model, windows, [*groups, *missing], len(windows))


def _layer_windows(model: ModelConfig) -> dict[int, int | None]:
    """Return the windows of the layers that have a cache of their own, keyed by layer."""
    recurrent = frozenset[int]() if model.recurrent is None else model.recurrent.layers
    return {
        # Tokens that see later ones run in one step, so nothing can be freed before its end.
        index: layer.window if model.is_causal else None
        for index, layer in enumerate(model.layers)
        if index not in recurrent and layer.cache_layer is None
    }


def _place_layers(
    model: ModelConfig, windows: dict[int, int | None], groups: Sequence[int | None], size: int
) -> LayerGroups:
    """Fill the groups of each window in turn, with `size` layers each."""
    places: dict[int, Place] = {}
    counts = Counter[int | None]()
    for index, window in windows.items():
        num_full, row = divmod(counts[window], size)
        places[index] = Place(groups.index(window) + num_full, row)
        counts[window] += 1
    for index, layer in enumerate(model.layers):
        if layer.cache_layer is not None:
            places[index] = places[layer.cache_layer]
    num_rows = 1 + max(place.row for place in places.values())
    return LayerGroups(tuple(groups), tuple(places[index] for index in sorted(places)), num_rows)


def wanted_blocks(config: EngineConfig, windows: Windows) -> int:
    """Return the number of blocks of all groups: as configured, or all that can be of use.

    `max_num_seqs` sequences of full length use that many. In a window, a chunk of a prompt adds
    some; a chunk takes at most half of the free blocks.
    """
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks * len(windows)
    size, num_seqs = config.kvcache_block_size, config.max_num_seqs
    whole, chunk = -(-config.max_model_len // size), -(-config.max_num_batched_tokens // size)
    num_blocks = 0
    for window in windows:
        num_blocks += num_seqs * whole
        if window is not None:
            seen = min(-(-window // size) + 1, whole)
            num_blocks -= max(num_seqs * (whole - seen) - 2 * chunk, 0)
    return num_blocks


def agree(number: int, device: Device) -> int:
    """Return the minimum of a number of blocks or states over all ranks."""
    smallest = device.group.smallest(number, device.torch_device)
    if smallest < number:
        text = "%d instead of %d, because another rank has less memory"
        logger.info(f"KV-cache blocks or states: {text}", smallest, number)
    return smallest
