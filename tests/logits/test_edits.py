"""How rows that are edited together are divided, so that their tensors stay small."""

from __future__ import annotations

import random

import pytest

from nanovllm.logits.edits import EditedRow, RowEdits, in_pieces

NONE = RowEdits(0, [], {}, None, [], True)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_row_once_and_few_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.logits.edits.MAX_TOKENS", 100)
    rng = random.Random(seed)
    rows = [EditedRow(i, i, rng.randint(1, 150), NONE) for i in range(rng.randint(0, 40))]
    pieces = list(in_pieces(rows, lambda row: row.position))
    assert sorted(row.row for piece in pieces for row in piece) == list(range(len(rows)))
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * max(row.position for row in piece) <= 100
    assert len(pieces) <= 1 + sum(row.position for row in rows) // 25
