"""Tiles of weights that stay quantised fit into the shared memory of small devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.fp8 import FP8
from nanovllm.kernels.cuda import linear_tiles
from nanovllm.kernels.cuda.codes_few_rows import codes_config
from nanovllm.kernels.cuda.experts_grouped import grouped_config
from nanovllm.kernels.stored_weights import Fp8Weight, Int4Weight, StoredWeight

FP8_WEIGHT = Fp8Weight(torch.empty(256, 512, dtype=FP8), torch.ones(256, 1), 512)
INT4_WEIGHT = Int4Weight(torch.empty(256, 64, dtype=torch.int32), torch.ones(256, 4), None, 512)


@pytest.mark.parametrize("size", [48 << 10, 90 << 10, 219 << 10])
@pytest.mark.parametrize("weight", [FP8_WEIGHT, INT4_WEIGHT], ids=["fp8", "int4"])
def test_stages_fit(monkeypatch: pytest.MonkeyPatch, size: int, weight: StoredWeight) -> None:
    monkeypatch.setattr(linear_tiles, "shared_bytes", lambda _: size)
    x = torch.empty(1, 512, dtype=torch.bfloat16)
    configs: list[Any] = [codes_config(weight, rows) for rows in (2, 32, 64)]
    configs += [grouped_config(rows, x, weight) for rows in (8, 20, 48, 200)]
    for config in configs:
        words = config.block_out * 128 * weight.bits // 8
        stage = words + config.block_rows * 128 * x.itemsize
        assert config.num_stages == 1 or config.num_stages * stage <= size
        assert config.num_stages > 2 or size < 219 << 10, "an H200 has room for all"
