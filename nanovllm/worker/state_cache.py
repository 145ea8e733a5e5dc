"""Recurrent states: their size and layout, defined only here, and the states that a step uses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig, RecurrentConfig
from nanovllm.engine.executor import StateCounts
from nanovllm.engine.step import StateCopy, StepPlan
from nanovllm.errors import ConfigError
from nanovllm.layers.shards import sharded
from nanovllm.ops.interface import LayerState, RecurrentRows
from nanovllm.ops.torch_delta_net import split_chunks
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.device_interface import Device
from nanovllm.worker.kv_cache import KVCacheSpec, agree, wanted_blocks

logger = logging.getLogger(__name__)

ALIGNMENT = 256  # in bytes: kernels read aligned states faster


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Shape of a sequence's state: each recurrent layer has a recurrent and a conv state."""

    layers: tuple[int, ...]  # indices of the recurrent layers
    recurrent: tuple[int, int, int]  # value heads, key_dim, value_dim
    conv: tuple[int, int]  # channels, conv_size - 1
    dtype: torch.dtype  # dtype of conv states; recurrent states are float32

    @property
    def part_bytes(self) -> tuple[int, int]:
        sizes = 4 * math.prod(self.recurrent), self.dtype.itemsize * math.prod(self.conv)
        return sizes[0], -(-sizes[1] // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return len(self.layers) * sum(self.part_bytes)


class StateCache:
    """All states on the device. A state is contiguous, so that it is copied as a whole."""

    def __init__(self, spec: StateSpec, counts: StateCounts, device: Device) -> None:
        self.counts = counts
        self.states = device.allocate_cache(counts.total * spec.num_bytes).view(counts.total, -1)
        self.layers = {index: self._layer(spec, i) for i, index in enumerate(spec.layers)}

    def copy(self, copies: list[StateCopy]) -> None:
        for copy in copies:
            self.states[copy.target].copy_(self.states[copy.source])

    def _layer(self, spec: StateSpec, index: int) -> LayerState:
        first, size = index * sum(spec.part_bytes), spec.part_bytes[0]
        conv_size = spec.dtype.itemsize * math.prod(spec.conv)
        recurrent = self.states[:, first : first + size].view(torch.float32)
        conv = self.states[:, first + size :][:, :conv_size].view(spec.dtype)
        return LayerState(recurrent.unflatten(1, spec.recurrent), conv.unflatten(1, spec.conv))


def recurrent_rows(plan: StepPlan, upload: Callable[[np.ndarray], Tensor]) -> RecurrentRows:
    """Return the slots of a plan's rows; unless each has one token, also counts and chunks."""
    slots = upload(plan.slots.astype(np.int64))
    if (plan.counts == 1).all():
        return RecurrentRows(slots)
    chunks = split_chunks(plan.slots, plan.counts)
    return RecurrentRows(slots, plan.counts.tolist(), upload(chunks))


def create_state_cache(
    config: EngineConfig,
    recurrent: RecurrentConfig,
    dtype: torch.dtype,
    cache: KVCacheSpec,
    device: Device,
    budget: int,
) -> StateCache:
    """Allocate the recurrent states, and leave the rest of the budget to the KV cache."""
    spec = state_spec(recurrent, dtype, device.group)
    counts = choose_state_counts(config, spec, cache, budget)
    sizes = counts.num_slots, counts.num_snapshots
    return StateCache(spec, StateCounts(*(agree(size, device) for size in sizes)), device)


def state_spec(recurrent: RecurrentConfig, dtype: torch.dtype, group: TPGroup) -> StateSpec:
    key_heads = sharded(recurrent.num_key_heads, group).count
    value_heads = sharded(recurrent.num_value_heads, group).count
    channels = 2 * key_heads * recurrent.key_dim + value_heads * recurrent.value_dim
    return StateSpec(
        tuple(sorted(recurrent.layers)),
        (value_heads, recurrent.key_dim, recurrent.value_dim),
        (channels, recurrent.conv_size - 1),
        dtype,
    )


def choose_state_counts(
    config: EngineConfig, spec: StateSpec, cache: KVCacheSpec, budget: int
) -> StateCounts:
    """Use at most a quarter of the budget, in bytes, for slots, and a quarter for snapshots.

    Snapshots also use at most a quarter of the total of KV cache, slots and snapshots.
    """
    quarter = budget // 4
    num_slots = min(config.max_num_seqs, quarter // spec.num_bytes)
    if num_slots < 1:
        raise ConfigError(
            f"no room for recurrent states: one takes {spec.num_bytes:,} bytes, and a quarter of "
            f"the memory for caches is {quarter:,}; free memory or, on a GPU, lower "
            "max_num_batched_tokens"
        )
    num_blocks = wanted_blocks(config, cache.groups.windows)
    third = (num_blocks * cache.block_bytes + num_slots * spec.num_bytes) // 3
    num_snapshots = min(min(quarter, third) // spec.num_bytes, num_blocks)
    if not config.enable_prefix_caching:
        num_snapshots = 0
    if num_slots < config.max_num_seqs:
        text = "Running sequences are limited to %d: the recurrent state of each takes %.1f MiB"
        logger.warning(text, num_slots, spec.num_bytes / (1 << 20))
    return StateCounts(num_slots, num_snapshots)
