"""How layers are split into groups, and how their caches lie in a buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm.config import EngineConfig, LayerAttention, ModelConfig
from nanovllm.engine.executor import Windows
from nanovllm.models.registry import read_config
from nanovllm.ops.fp8 import FP8
from nanovllm.worker.kv_cache import (
    KVCacheSpec,
    Place,
    join_groups,
    split_layers,
    wanted_blocks,
)
from tests.models.test_configs import saved


def make_model(windows: list[int | None], shared: dict[int, int] | None = None) -> ModelConfig:
    """Return a model with these windows; the keys of `shared` use the caches of its values."""
    model = read_config(saved("llama"))
    layers = [
        LayerAttention(model.layers[0].rope, window, (shared or {}).get(index))
        for index, window in enumerate(windows)
    ]
    return replace(model, layers=tuple(layers))


GEMMA_3_27B = ([1024] * 5 + [None]) * 10 + [1024] * 2


@pytest.mark.parametrize(
    ("windows", "groups", "num_rows"),
    [
        ([None] * 28, (None,), 28),  # Qwen3
        ([4096] * 32, (4096,), 32),  # Mistral
        ([128, None] * 18, (None, 128), 18),  # gpt-oss
        (GEMMA_3_27B, (None, *[1024] * 6), 10),
        ([64] * 4 + [None] * 3, (None, 64), 4),  # almost equally frequent
        ([9, 3, 9, 3, None], (None, 3, 3, 9, 9), 1),
    ],
)
def test_layers_with_the_same_window_are_split_into_groups_of_equal_size(
    windows: list[int | None], groups: Windows, num_rows: int
) -> None:
    split = split_layers(make_model(windows))
    assert (split.windows, split.num_rows) == (groups, num_rows)
    assert [split.windows[place.group] for place in split.places] == windows
    assert len(set(split.places)) == len(windows)


def test_a_layer_that_shares_a_cache_has_none_of_its_own() -> None:
    split = split_layers(make_model([8, None, 8, None, 8, None], {4: 2, 5: 3}))
    assert (split.windows, split.num_rows) == ((None, 8), 2)
    assert split.places[4] == split.places[2] == Place(1, 1)
    assert split.places[5] == split.places[3] == Place(0, 1)


def test_tokens_that_see_later_ones_need_full_attention() -> None:
    model = replace(make_model([8, None, 8]), is_causal=False)
    assert split_layers(model).windows == (None,)


@pytest.mark.parametrize(
    ("windows", "target", "groups", "num_rows"),
    [
        ([None] * 3, (None, 8, 8), (None, 8, 8), 3),
        ([8, None, 8], (None, 8, 8), (None, 8, 8), 2),  # the first of its groups
        ([9, None, 8], (None, 8, 8), (None, 8, 8), 2),  # no such window: full attention
        ([9, 8], (8,), (8, None), 1),
        ([8], (8,), (8,), 1),
    ],
)
def test_a_draft_model_joins_the_groups_of_its_target(
    windows: list[int | None], target: Windows, groups: Windows, num_rows: int
) -> None:
    joined = join_groups(make_model(windows), target)
    assert (joined.windows, joined.num_rows) == (groups, num_rows)
    assert len(set(joined.places)) == len(windows)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_layers_of_a_row_share_memory_and_the_others_do_not(dtype: torch.dtype) -> None:
    split = split_layers(make_model([8, 8, None, 8, None, 8]))
    spec = KVCacheSpec(split, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype)
    buffer = torch.zeros(5 * spec.block_bytes, dtype=torch.uint8)
    caches = spec.views(buffer, 5)
    assert [cache.group for cache in caches] == [1, 1, 0, 2, 0, 2]
    for cache, place in zip(caches, split.places, strict=True):
        for part in cache.parts:
            part.view(torch.uint8).fill_(1 + place.row)
    for cache, place in zip(caches, split.places, strict=True):
        assert all((part.view(torch.uint8) == 1 + place.row).all() for part in cache.parts)
    assert buffer.all()


def test_the_number_of_blocks() -> None:
    """By default, windows get as many as sequences and two chunks can use, full groups more."""
    config = EngineConfig("m", num_kvcache_blocks=100)
    assert wanted_blocks(config, (None, 64, 64)) == 300
    config = EngineConfig(
        "m", kvcache_block_size=16, max_num_seqs=4, max_model_len=1600, max_num_batched_tokens=160
    )
    assert wanted_blocks(config, (None,)) == 400
    assert wanted_blocks(config, (64,)) == 4 * 5 + 2 * 10
    assert wanted_blocks(config, (None, 64, 5000)) == 400 + 40 + 400
