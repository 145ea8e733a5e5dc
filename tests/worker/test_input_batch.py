"""The InputBatch has the right shapes even for the smallest engine."""

from __future__ import annotations

import pytest

from nanovllm.worker.input_batch import InputBatch
from tests.devices import cpu_device


@pytest.mark.parametrize("max_model_len", [1, 16, 17])
def test_tables_have_a_row_for_each_slot(max_model_len: int) -> None:
    """Even if a sequence has at most one token or one block."""
    tables = InputBatch(cpu_device(), num_slots=3, max_model_len=max_model_len, block_size=16)
    assert tables.tokens.shape == (4, max_model_len)
    assert tables.block_tables.shape == (4, 1, -(-max_model_len // 16))
    assert tables.lengths.shape == tables.sampling_columns.seed.shape == (4,)
