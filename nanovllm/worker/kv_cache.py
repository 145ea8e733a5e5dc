"""The size and layout of the KV cache, defined only here."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.block_manager import reach_of
from nanovllm.engine.executor import Windows
from nanovllm.layers.shards import split_kv_heads
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.interface import LayerCache
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.device_interface import Device

logger = logging.getLogger(__name__)


KVShape = tuple[int, int]  # number and dimension of KV heads


class Kind(NamedTuple):
    """What the layers of a group have in common."""

    window: int | None  # None: full attention
    num_per_row: int = 1  # number of these layers that fit into a row of a block


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's keys and values are: in which group's blocks, and where in their rows."""

    group: int
    row: int
    part: int = 0
    shape: KVShape | None = None  # None: that of the row


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How layers are split into groups, which have a block table each.

    A block has `num_rows` rows, each with the keys and values of one layer of the group that holds
    the block, or of several smaller layers. So the blocks of all groups have the same size.
    """

    kinds: tuple[Kind, ...]  # one per group
    places: tuple[Place, ...]  # one per layer that has a cache
    num_rows: int

    @property
    def windows(self) -> Windows:
        return tuple(kind.window for kind in self.kinds)

    @property
    def id_factors(self) -> tuple[int, ...]:
        """For each group, what multiplies block ids: parts of a row count as blocks, too."""
        return tuple(kind.num_per_row for kind in self.kinds)


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
        return [self._view(by_row[place.row], place) for place in self.groups.places]

    def _view(self, row: LayerCache, place: Place) -> LayerCache:
        """Return the view of a row for one layer."""
        if place.shape is None:
            return replace(row, group=place.group)
        # Block i of a layer at `part` is number i * num_per_row + part of these smaller blocks.
        shape = -1, self.block_size, *place.shape
        k, v = (each.view(shape)[place.part :] for each in (row.k, row.v))
        return LayerCache(k, v, group=place.group)


def kv_cache_spec(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    tp: TPGroup,
    target: ModelConfig | None = None,
) -> KVCacheSpec:
    """Describe the KV cache of a model; a draft model's layers join the groups of its target."""
    is_fp8 = config.kv_cache_dtype != "auto"
    has_drafts = config.speculative is not None and config.speculative.model is not None
    if is_fp8 or has_drafts or target is not None or not _can_share_rows(model):
        model = with_equal_shapes(model)
    if target is None:
        groups = split_layers(model)
    else:
        groups = join_groups(model, split_layers(with_equal_shapes(target)).windows)
    num_kv_heads, head_dim = row_shape(model)
    num_kv_heads = split_kv_heads(num_kv_heads, tp).count
    shape = config.kvcache_block_size, num_kv_heads, head_dim
    return KVCacheSpec(groups, *shape, FP8 if is_fp8 else dtype)


def split_layers(model: ModelConfig) -> LayerGroups:
    """Split layers of the same kind into groups of about equal size, full attention first.

    A group has as many rows as the rarest kind, unless all kinds are almost equally frequent: then
    each kind is a group, and the smaller ones leave rows of their blocks empty.
    """
    kinds = _layer_kinds(model)
    num_rows = {
        kind: -(-count // kind.num_per_row) for kind, count in Counter(kinds.values()).items()
    }
    least, most = min(num_rows.values()), max(num_rows.values())
    size = most if 2 * most < 3 * least else least
    groups: list[Kind] = []
    for kind in sorted(num_rows, key=lambda kind: (kind.window or 0, kind.num_per_row)):
        groups += [kind] * -(-num_rows[kind] // size)
    return _place_layers(model, kinds, groups, size)


def join_groups(model: ModelConfig, windows: Windows) -> LayerGroups:
    """Put each layer into the first group with its window.

    Layers without such a group get full attention; if there is no group for it, one is added.
    """
    full, groups = Kind(None), [Kind(window) for window in windows]
    kinds = {layer: kind if kind in groups else full for layer, kind in _layer_kinds(model).items()}
    if full not in groups and full in kinds.values():
        groups.append(full)
    return _place_layers(model, kinds, groups, len(kinds))


def with_equal_shapes(model: ModelConfig) -> ModelConfig:
    """Return a model whose layers all have the largest number and dimension of KV heads."""
    layers = tuple(replace(layer, kv_shape=None) for layer in model.layers)
    return replace(model, layers=layers)


def _can_share_rows(model: ModelConfig) -> bool:
    """Return whether a whole number of layers of each size fits into a row."""
    row_size = math.prod(row_shape(model))
    return all(row_size % math.prod(each.kv_shape) == 0 for each in model.layers if each.kv_shape)


def row_shape(model: ModelConfig) -> KVShape:
    """Return the shape of the largest layer."""
    shapes = [layer.kv_shape or (model.num_kv_heads, model.head_dim) for layer in model.layers]
    return max(shapes, key=math.prod)


def _layer_kinds(model: ModelConfig) -> dict[int, Kind]:
    """Return the kinds of the layers that have a cache of their own, keyed by layer."""
    recurrent = frozenset[int]() if model.recurrent is None else model.recurrent.layers
    row_size = math.prod(row_shape(model))
    return {
        # Tokens that see later ones run in one step, so nothing can be freed before its end.
        index: Kind(
            layer.window if model.is_causal else None,
            1 if layer.kv_shape is None else row_size // math.prod(layer.kv_shape),
        )
        for index, layer in enumerate(model.layers)
        if index not in recurrent and layer.cache_layer is None
    }


def _place_layers(
    model: ModelConfig, kinds: dict[int, Kind], groups: list[Kind], size: int
) -> LayerGroups:
    """Fill the groups of each kind in turn, each with layers for `size` rows."""
    places: dict[int, Place] = {}
    counts = Counter[Kind]()
    for index, kind in kinds.items():
        row, part = divmod(counts[kind], kind.num_per_row)
        num_full, row = divmod(row, size)
        group = groups.index(kind) + num_full
        places[index] = Place(group, row, part, model.layers[index].kv_shape)
        counts[kind] += 1
    for index, layer in enumerate(model.layers):
        if layer.cache_layer is not None:
            places[index] = places[layer.cache_layer]
    num_rows = 1 + max(place.row for place in places.values())
    return LayerGroups(tuple(groups), tuple(places[index] for index in sorted(places)), num_rows)


def wanted_blocks(config: EngineConfig, windows: Windows) -> int:
    """Return the number of blocks of all groups: as configured, or all that can be of use.

    `max_num_seqs` sequences of full length use that many. In a window, each holds what the next
    token may see, and the block of that token. A chunk of a prompt needs twice its own blocks
    besides: it may take half of the free ones (`BlockManager.row_end`).
    """
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks * len(windows)
    size, num_seqs = config.kvcache_block_size, config.max_num_seqs
    whole, chunk = -(-config.max_model_len // size), -(-config.max_num_batched_tokens // size)
    num_blocks = 0
    for window in windows:
        held = min(reach_of(window, size) + 1, whole)
        num_blocks += min(num_seqs * held + 2 * chunk, num_seqs * whole)
    return num_blocks


def agree(number: int, device: Device) -> int:
    """Return the minimum of a number of blocks or states over all ranks."""
    smallest = device.group.smallest(number, device.torch_device)
    if smallest < number:
        text = "%d instead of %d, because another rank has less memory"
        logger.info(f"KV-cache blocks or states: {text}", smallest, number)
    return smallest
