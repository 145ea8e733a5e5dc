"""How layers are split into groups, and how their caches lie in a buffer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nanovllm.config import EngineConfig, LayerAttention, ModelConfig
from nanovllm.engine.executor import Windows
from nanovllm.models.registry import read_config
from nanovllm.ops.fp8 import FP8
from nanovllm.ops.tp_group import TPGroup
from nanovllm.worker.kv_cache import (
    KVCacheSpec,
    KVShape,
    Place,
    join_groups,
    kv_cache_spec,
    split_layers,
    wanted_blocks,
)
from tests.models.test_configs import saved


def make_model(
    windows: list[int | None],
    shared: dict[int, int] | None = None,
    shapes: dict[int | None, KVShape] | None = None,
) -> ModelConfig:
    """Return a model with these windows; the keys of `shared` use the caches of its values.

    `shapes` is keyed by window.
    """
    model = read_config(saved("llama"))
    layers = [
        LayerAttention(
            model.layers[0].rope, window, (shared or {}).get(index), (shapes or {}).get(window)
        )
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


@pytest.mark.parametrize(
    ("windows", "shapes", "groups", "num_rows"),
    [
        # Gemma 4 31B: a row holds two layers with full attention.
        (([8] * 5 + [None]) * 10, {8: (16, 256), None: (4, 512)}, (None, *[8] * 10), 5),
        # Gemma 4 26B-A4B: five such layers take three rows.
        (([8] * 5 + [None]) * 5, {8: (8, 256), None: (2, 512)}, (None, *[8] * 9), 3),
        ([8, None] * 3, {8: (2, 16), None: (1, 32)}, (None, 8), 3),
    ],
)
def test_a_row_holds_several_small_layers(
    windows: list[int | None], shapes: dict[int | None, KVShape], groups: Windows, num_rows: int
) -> None:
    split = split_layers(make_model(windows, shapes=shapes))
    assert (split.windows, split.num_rows) == (groups, num_rows)
    assert len(set(split.places)) == len(windows)
    config, group = EngineConfig("m", kvcache_block_size=16), TPGroup()
    spec = kv_cache_spec(config, make_model(windows, shapes=shapes), torch.float16, group)
    assert spec.block_bytes == 2 * num_rows * 16 * math.prod(shapes[8]) * 2
    caches = spec.views(torch.zeros(40 * spec.block_bytes, dtype=torch.uint8), 40)
    # Give each group its own blocks, and fill them with a number per layer.
    for i, (cache, window) in enumerate(zip(caches, windows, strict=True)):
        assert cache.k.shape[2:] == shapes[window]
        for block_id in range(cache.group, 40, len(groups)):
            for part in (cache.k, cache.v):
                assert not part[block_id * split.id_factors[cache.group]].any()
                part[block_id * split.id_factors[cache.group]] = 1 + i
    for i, cache in enumerate(caches):
        for block_id in range(cache.group, 40, len(groups)):
            for part in (cache.k, cache.v):
                assert (part[block_id * split.id_factors[cache.group]] == 1 + i).all()


def test_layers_have_equal_shapes_where_rows_cannot_be_shared() -> None:
    """The sizes do not divide, the cache is FP8, or a draft model uses the same block tables."""
    group, model = TPGroup(), make_model([8, None], shapes={8: (2, 16), None: (3, 16)})
    specs = [kv_cache_spec(EngineConfig("m"), model, torch.float16, group)]
    model = make_model([8, None], shapes={8: (2, 16), None: (1, 16)})
    config = EngineConfig("m", kv_cache_dtype="fp8")
    specs.append(kv_cache_spec(config, model, torch.float16, group))
    config = EngineConfig("m", speculative_config={"method": "draft_model", "model": "d"})
    specs.append(kv_cache_spec(config, model, torch.float16, group))
    specs.append(kv_cache_spec(EngineConfig("m"), model, torch.float16, group, target=model))
    for spec in specs:
        assert spec.groups.id_factors == (1, 1)
        assert (spec.num_kv_heads, spec.head_dim) == (model.num_kv_heads, model.head_dim)


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
