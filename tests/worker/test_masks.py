"""Bitmasks keep the logits of the tokens whose bits are set, in the masked rows only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.engine.step import Bitmasks, StepPlan
from nanovllm.worker.bitmasks import apply_bitmasks
from tests.devices import cpu_device


@pytest.mark.parametrize("vocab_size", [64, 160, 1003])
@pytest.mark.parametrize("masked_rows", [[0, 1, 3, 4], [3], [1, 4]])
def test_masks(vocab_size: int, masked_rows: list[int]) -> None:
    rng = np.random.default_rng(0)
    column = np.ones(5, np.int32)
    num_logits = np.array([1, 1, 0, 1, 1], np.int32)
    slots = np.array([7, 2, 5, 4, 3], np.int32)
    plan = StepPlan(slots, column, column, num_logits, [], [], [], 0, needs_bitmasks=True)
    is_allowed = rng.random((len(masked_rows), -(-vocab_size // 32) * 32)) < 0.5
    masks = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    logits = torch.from_numpy(rng.standard_normal((4, vocab_size), np.float32))
    want = logits.clone()
    for index, row in enumerate(masked_rows):
        allowed = torch.from_numpy(is_allowed[index, :vocab_size])
        want[[0, 1, None, 2, 3][row]].masked_fill_(~allowed, -torch.inf)
    apply_bitmasks(cpu_device(), logits, plan, Bitmasks(slots[masked_rows], masks))
    assert torch.equal(logits, want)
