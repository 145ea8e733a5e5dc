"""How the memory for caches is divided between states, snapshots and blocks."""

from __future__ import annotations

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.worker.kv_cache import Kind, KVCacheSpec, LayerGroups, Place
from nanovllm.worker.state_cache import StateSpec, choose_state_counts

SPEC = StateSpec((0, 1, 2), (4, 16, 16), (96, 3), torch.float32)
BLOCK = KVCacheSpec(LayerGroups((Kind(None),), (Place(0, 0),), 1), 64, 2, 16, torch.float32)
MANY = 10_000 * SPEC.num_bytes


def counts(budget: int, **options: object) -> tuple[int, int]:
    config = EngineConfig("model", **options)
    found = choose_state_counts(config, SPEC, BLOCK, budget)
    states = SPEC.num_bytes * found.num_snapshots
    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        num_blocks = found.num_slots * config.max_model_len // config.kvcache_block_size
    cache = num_blocks * BLOCK.block_bytes + SPEC.num_bytes * found.num_slots
    assert states <= (cache + states) / 4
    assert found.num_snapshots <= num_blocks
    return found.num_slots, found.num_snapshots


def test_slots_are_limited_by_memory_only() -> None:
    assert counts(MANY, max_num_seqs=1, max_model_len=64)[0] == 1
    assert counts(MANY, max_num_seqs=16, max_model_len=128)[0] == 16
    assert counts(40 * SPEC.num_bytes, max_num_seqs=16, max_model_len=128)[0] == 10
    assert counts(MANY, max_num_seqs=16, num_kvcache_blocks=4)[0] == 16
    with pytest.raises(ConfigError, match="no room for recurrent states"):
        counts(3 * SPEC.num_bytes)


def test_there_are_snapshots_only_for_a_prefix_cache() -> None:
    assert counts(MANY, max_num_seqs=4, max_model_len=4096)[1] > 4
    options = {"max_num_seqs": 4, "max_model_len": 4096, "enable_prefix_caching": False}
    assert counts(MANY, **options)[1] == 0
