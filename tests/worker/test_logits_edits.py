"""Rows whose logits are edited together are split into groups, to bound memory."""

from __future__ import annotations

import random

import pytest

from nanovllm.worker.logits_edits import in_pieces


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_row_once_and_few_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.worker.logits_edits.MAX_TOKENS", 100)
    rng = random.Random(seed)
    rows = [(i, rng.randint(1, 150)) for i in range(rng.randint(0, 40))]
    pieces = list(in_pieces(rows, lambda row: row[1]))
    assert sorted(row for piece in pieces for row in piece) == rows
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * max(length for _, length in piece) <= 100
    assert len(pieces) <= 1 + sum(length for _, length in rows) // 25
