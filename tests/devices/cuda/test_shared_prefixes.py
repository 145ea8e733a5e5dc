"""Rows that begin with the same blocks: found on the host, and decoded like other rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from nanovllm import LLM
from nanovllm.devices.cuda import shared_prefixes
from nanovllm.devices.cuda.shared_prefixes import NO_BLOCK, NUM_GROUPS, find_groups
from tests.devices import NEEDS_GPU, runner_of
from tests.test_equals_transformers import GREEDY, MAX_TOKENS
from tests.test_gpu import OPTIONS


def groups_of(rows: list[list[int]]) -> tuple[np.ndarray, ...]:
    """Find the groups of rows with these blocks; row i has slot 10 + i."""
    blocks = np.full((10 + len(rows), 6), NO_BLOCK, np.int32)
    for row, block_ids in zip(blocks[10:], rows, strict=True):
        row[: len(block_ids)] = block_ids
    return find_groups(blocks, np.arange(10, len(blocks), dtype=np.int32), block_size=16)


def test_groups() -> None:
    """Rows 0, 2 and 4 share two blocks, 1 and 5 share all that row 5 has, 3 is alone."""
    rows = [[7, 8, 1], [4, 5, 6, 2], [7, 8, 9, 3], [0], [7, 8], [4, 5, 6]]
    groups, members, lens = groups_of(rows)
    assert groups[:, :2].tolist() == [[10, 11], [32, 48], [0, 3], [3, 2]]
    assert not groups[:, 2:].any()
    assert members[:5].tolist() == [0, 2, 4, 1, 5]
    assert lens.tolist() == [32, 48, 32, 0, 32, 48]


def test_only_the_largest_groups() -> None:
    rows = [[i] for i in range(NUM_GROUPS + 2) for _ in range(2 + i)]
    groups, members, lens = groups_of(rows)
    assert groups[3].tolist() == [NUM_GROUPS + 3 - i for i in range(NUM_GROUPS)]
    for slot, _, first, count in groups.T.tolist():
        assert {rows[i][0] for i in members[first : first + count]} == {rows[slot - 10][0]}
    assert (lens == 0).sum() == 2 + 3


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_equals_transformers(tiny: Any, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Greedy tokens are correct for two prefixes with many suffixes each, and other prompts."""
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED", 1)
    checkpoint, rng = tiny("qwen3"), random.Random(2)
    first, second = (rng.choices(range(160), k=length) for length in (40, 55))
    prompts = [[*prefix, i] for i in range(20) for prefix in (first, second)]
    prompts += [rng.choices(range(160), k=5 + i) for i in range(5)]
    with LLM(checkpoint.path, **{**OPTIONS, "max_num_seqs": 48, "device": device}) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        shared = runner_of(llm).forward.decode.prefixes
        assert shared._is_worth_it
        assert sorted(set(shared._tables[4:6].tolist())) == [32, 48]
    for i in (0, 1, 38, 39, 42):
        assert outputs[i].token_ids == checkpoint.generate(prompts[i], MAX_TOKENS)
