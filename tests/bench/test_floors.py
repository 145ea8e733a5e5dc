"""Compare roofline floors with numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.floors import (
    ModelCost,
    Rates,
    decode_floor,
    model_cost,
    prefill_floor,
    rates_of,
)
from benchmarks.models import model_path
from benchmarks.workloads import Workload
from nanovllm.errors import ConfigError
from nanovllm.models.registry import read_config

# Small enough to compute by hand; everything is bound by this slow memory.
COST = ModelCost(layer_weights=100, head_weights=20, kv_bytes=8, attention_flops=16, itemsize=2)
RATES = Rates(bytes_per_second=10.0, flops_per_second=1000.0)


def cost_of(name: str) -> ModelCost:
    return model_cost(read_config(json.loads(Path(model_path(name)).read_text())), 2)


def test_bytes_of_a_step() -> None:
    small, large = cost_of("qwen3-0.6b"), cost_of("qwen3-8b")
    assert small.weight_bytes(1) == 1_191_968_768  # 28 x 15,728,640 + 151,936 x 1,024, in bf16
    assert large.weight_bytes(1) == 15_136_194_560  # without the input embedding
    assert (small.kv_bytes, large.kv_bytes) == (114_688, 147_456)
    assert small.attention_flops == 28 * 16 * 128 * 4


def test_bytes_of_a_step_with_experts() -> None:
    cost = cost_of("qwen3-30b-a3b")
    expert = 48 * 3 * 2048 * 768
    rest = 48 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128) + 151936 * 2048
    assert cost.weight_bytes(1) == 2 * (rest + 8 * expert)
    assert cost.weight_bytes(2) == pytest.approx(2 * (rest + 15.5 * expert))
    assert cost.weight_bytes(10_000) == pytest.approx(2 * (rest + 128 * expert))


def test_prefill_by_hand() -> None:
    # Products: 3 + 2 tokens, 2 of them sampled: 2 x (100 x 5 + 20 x 2) operations take 1.08 s, and
    # 240 bytes of weights 24 s. Attention: 6 + 3 pairs take 0.144 s, and 5 tokens of KV 4 s.
    assert prefill_floor(COST, RATES, [3, 2]) == pytest.approx(24 + 4)
    # With plenty of memory bandwidth only the operations count.
    fast = Rates(bytes_per_second=1e9, flops_per_second=1000.0)
    assert prefill_floor(COST, fast, [3, 2]) == pytest.approx(1.08 + 0.144, abs=1e-6)


def test_decode_by_hand() -> None:
    # Step 1 runs both rows over 3 + 1 and 2 + 1 tokens, step 2 the first alone over 3 + 2.
    workload = Workload([[0, 0, 0], [0, 0]], [3, 2])
    assert decode_floor(COST, RATES, workload) == pytest.approx((24 + 7 * 0.8) + (24 + 5 * 0.8))
    assert decode_floor(COST, RATES, Workload([[0]], [1])) == 0.0


def test_rates_are_known_of_an_h200_only() -> None:
    """Other devices have a floor only if their rates are given."""
    assert rates_of("NVIDIA H200", None, None) == Rates()
    assert rates_of("NVIDIA H200", 4.0, None) == Rates(4e12)
    assert rates_of("cpu", None, None) is None
    assert rates_of("NVIDIA H100 80GB HBM3", 3.0, 700.0) == Rates(3e12, 700e12)
    for given in ((3.0, None), (None, 700.0)):
        with pytest.raises(ConfigError, match=r"H100.*give both --bandwidth and --tflops"):
            rates_of("NVIDIA H100 80GB HBM3", *given)
    for wrong in ((0.0, 700.0), (3.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            rates_of("NVIDIA H200", *wrong)
