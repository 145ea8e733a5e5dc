"""Tiles of quantized weights fit into the shared memory of small devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.devices.cuda.kernels import linear_tiles
from nanovllm.devices.cuda.kernels.experts_grouped import grouped_config
from nanovllm.devices.cuda.kernels.linear_few_rows import few_rows_config
from nanovllm.ops.quantized_weight import QuantizedWeight

FP8_WEIGHT, INT4_WEIGHT = (
    QuantizedWeight(
        bits, torch.empty(256, 16 * bits, dtype=torch.int32), torch.ones(256, groups), None, 512
    )
    for bits, groups in ((8, 1), (4, 4))
)


@pytest.mark.parametrize("size", [48 << 10, 90 << 10, 219 << 10])
@pytest.mark.parametrize("weight", [FP8_WEIGHT, INT4_WEIGHT], ids=["fp8", "int4"])
def test_stages_fit(monkeypatch: pytest.MonkeyPatch, size: int, weight: QuantizedWeight) -> None:
    monkeypatch.setattr(linear_tiles, "shared_bytes", lambda _: size)
    x = torch.empty(1, 512, dtype=torch.bfloat16)
    configs: list[Any] = [few_rows_config(weight, rows) for rows in (2, 32, 64)]
    configs += [grouped_config(rows, x, weight) for rows in (8, 20, 48, 200)]
    for config in configs:
        words = config.block_out * 128 * weight.bits // 8
        stage = words + config.block_rows * 128 * x.itemsize
        assert config.num_stages == 1 or config.num_stages * stage <= size
        assert config.num_stages > 2 or size < 219 << 10, "an H200 has room for all"
