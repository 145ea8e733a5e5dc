"""The paged attention kernels, compiled, equal plain torch in float64.

test_interpreted.py does the same without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.devices.cuda.kernels.attention_configs import (
    TileSizes,
    choose_large_tile,
    choose_prefill_splits,
    choose_splits,
    decode_config,
    prefill_config,
    with_more_stages,
)
from nanovllm.devices.cuda.kernels.paged_attention import QueryRows, paged_attention
from tests.devices.cuda.kernels.interpreted import paged_attention_cases as cases

LARGE_TILES = TileSizes(64, 4, 3), TileSizes(64, 2, 4), TileSizes(64, 2, 3)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("max_context", [1, 100, 4096, 131072])
def test_splits_fill_the_device_but_not_more(num_kv_heads: int, max_context: int) -> None:
    num_sms = 132
    splits = [choose_splits(rows, num_kv_heads, max_context, num_sms) for rows in range(1, 700)]
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    for num_rows, count in enumerate(splits, start=1):
        assert count in (1, 2, 4, 8, 16, 32)
        assert count <= 2 or count * num_rows * num_kv_heads <= 5 * num_sms
        assert count == 1 or num_rows * num_kv_heads < 5 * num_sms
        assert count == 1 or (count - 1) * 64 < max_context


def test_splits_of_a_usual_model() -> None:
    assert [choose_splits(rows, 8, 4096, 132) for rows in (1, 4, 16, 48, 64)] == [32, 16, 4, 2, 1]
    assert [choose_splits(rows, 8, 512, 132) for rows in (1, 4, 16, 24, 64)] == [8, 8, 4, 1, 1]


def test_splits_of_a_few_queries() -> None:
    """A cached prompt with few new tokens has many splits; few keys have none."""

    def splits(num_tokens: int, max_context: int) -> int:
        config = prefill_config(128, torch.bfloat16, 2 * num_tokens)
        return choose_prefill_splits(2 * num_tokens, 8, config, max_context, 132)

    assert [splits(n, 1 << 17) for n in (16, 32, 64, 128, 512, 4096)] == [32, 32, 16, 8, 1, 1]
    assert [splits(32, n) for n in (100, 1000, 4096)] == [1, 4, 16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_configurations_are_powers_of_two(head_dim: int, dtype: torch.dtype) -> None:
    large_tiles = (None, *LARGE_TILES)
    decodes = [decode_config(head_dim, dtype, large_tile) for large_tile in large_tiles]
    sizes = [size for decode in decodes for size in (decode.tile, decode.num_warps)]
    for num_q_rows in (1, 64, 65, 100_000):
        prefill = prefill_config(head_dim, dtype, num_q_rows)
        sizes += [prefill.q_rows, prefill.tile, prefill.num_warps]
    assert all(size & (size - 1) == 0 for size in sizes)
    assert all(decode.min_split % decode.tile == 0 for decode in decodes)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}-{index}")
        for kind in cases.KINDS
        for index, case in enumerate(
            cases.edge_cases(kind) + cases.sample(kind, 30, DTYPES, cases.LARGE)
        )
    ],
)
def test_compiled_kernels_equal_the_reference(kind: str, case: cases.Case) -> None:
    skip_without_tma(kind)
    cases.verify(case, kind, "cuda")


def skip_without_tma(kind: str) -> None:
    if kind == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "block_size"),
    [("prefill", 16), ("prefill", 48), ("prefill", 256), ("tma", 64), ("tma", 256)],
)
@pytest.mark.parametrize("group", [2, 4])
def test_a_large_mixed_step(group: int, kind: str, block_size: int) -> None:
    """Full tiles, many CTAs and long prefixes, in the shapes of Qwen3."""
    skip_without_tma(kind)
    chunks = ((0, 1500), (1000, 700), (0, 0), (3000, 33), (64, 64), (17, 5), (129, 400))
    case = cases.Case(chunks, group, 8, 128, block_size, torch.bfloat16)
    cases.verify(case, kind, "cuda")
    rows = tuple((97 * i, 1) for i in range(40))
    for num_splits in (1, 16):
        decode = replace(case, rows=rows, num_splits=num_splits)
        cases.verify(decode, "decode", "cuda")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("group", [2, 4])
def test_configurations_of_hopper(group: int) -> None:
    """Large tiles for contexts with and without splits, and four stages for unsplit prompts."""
    skip_without_tma("tma")
    rows = tuple((97 * i, 1) for i in range(40))
    case = cases.Case(rows, group, 8, 128, 64, torch.bfloat16, num_splits=2)
    for num_splits, large_tile in zip((2, 1, 1), LARGE_TILES, strict=True):
        large = decode_config(128, torch.bfloat16, large_tile)
        cases.verify(replace(case, config=large, num_splits=num_splits), "decode", "cuda")
    config = with_more_stages(prefill_config(128, torch.bfloat16, 1024))
    assert config.num_stages == 4
    case = replace(case, rows=((0, 500), (100, 400), (0, 0), (700, 7)), num_splits=1)
    cases.verify(replace(case, config=config), "prefill", "cuda")


def test_large_tiles_by_number_of_rows() -> None:
    def large_tile(num_rows: int, max_context: int) -> TileSizes | None:
        num_splits = choose_splits(num_rows, 8, max_context, 132)
        return choose_large_tile(8 * num_rows, num_splits, max_context)

    split, unsplit, most_rows = LARGE_TILES
    numbers = (1, 8, 16, 23, 24, 40, 48, 49, 63, 64, 127, 128, 256)
    tiles = {n: large_tile(n, 4096) for n in numbers}
    expected = {24: split, 40: split, 48: split}
    expected |= {64: unsplit, 127: unsplit, 128: most_rows, 256: most_rows}
    assert {n: tile for n, tile in tiles.items() if tile} == expected
    assert large_tile(64, 512) is None


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
def test_a_graph_reads_lengths_and_blocks_on_the_device(num_splits: int) -> None:
    """A graph captured while every row was padding works for later rows."""
    rows = ((700, 1), (0, 0), (0, 1), (63, 1), (300, 1))
    case = cases.Case(rows, head_dim=128, dtype=torch.bfloat16)
    step = cases.make_step(case, "cuda")
    decodes = QueryRows(step.slots, step.context_lens, step.query_starts)
    config = decode_config(128, torch.bfloat16)

    def attend() -> None:
        tensors = step.q, step.cache, decodes, step.out
        paged_attention(*tensors, step.spec, config, num_splits)

    lengths = step.context_lens.clone()
    step.context_lens.zero_()
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    step.context_lens.copy_(lengths)
    graph.replay()
    cases.check(case, step, "decode")
