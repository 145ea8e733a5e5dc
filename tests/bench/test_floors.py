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
from benchmarks.workloads import Workload, mixed, uniform
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


def test_bytes_of_a_cache_of_eight_bits() -> None:
    config = read_config(json.loads(Path(model_path("qwen3-0.6b")).read_text()))
    assert model_cost(config, 2, "fp8").kv_bytes == 28 * 2 * 8 * 129


def test_bytes_of_a_step_with_experts() -> None:
    cost = cost_of("qwen3-30b-a3b")
    expert = 48 * 3 * 2048 * 768
    rest = 48 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128) + 151936 * 2048
    assert cost.weight_bytes(1) == 2 * (rest + 8 * expert)
    assert cost.weight_bytes(2) == pytest.approx(2 * (rest + 15.5 * expert))
    assert cost.weight_bytes(10_000) == pytest.approx(2 * (rest + 128 * expert))


def test_bytes_of_recurrent_states() -> None:
    """24 of 32 layers read and write a state of 32 heads in float32; the others have KV."""
    cost = cost_of("qwen3.5-9b")
    assert cost.state_bytes == 2 * 24 * 32 * 128 * 128 * 4
    assert cost.kv_bytes == 8 * 2 * 4 * 256 * 2


def test_prefill_by_hand() -> None:
    # Products: 3 + 2 tokens, 2 of them sampled: 2 x (100 x 5 + 20 x 2) operations take 1.08 s, and
    # 240 bytes of weights 24 s. Attention: 6 + 3 pairs take 0.144 s, and 5 tokens of KV 4 s.
    assert prefill_floor(COST, RATES, [3, 2]) == pytest.approx(24 + 4)
    # With plenty of memory bandwidth only the operations count.
    fast = Rates(bytes_per_second=1e9, flops_per_second=1000.0)
    assert prefill_floor(COST, fast, [3, 2]) == pytest.approx(1.08 + 0.144, abs=1e-6)


def test_a_cached_prefix_is_read_but_not_computed() -> None:
    fast = Rates(bytes_per_second=1e9, flops_per_second=1000.0)
    # One token of 3 is new: it runs through the layers and the head, and attends to 3 tokens.
    expected = 2 * (100 + 20) / 1000 + 3 * 16 / 1000
    assert prefill_floor(COST, fast, [3], num_cached=2) == pytest.approx(expected, abs=1e-6)
    slow = Rates(bytes_per_second=10.0, flops_per_second=1e9)
    assert prefill_floor(COST, slow, [3], num_cached=2) == pytest.approx(24 + 2.4)


def test_decode_by_hand() -> None:
    # Step 1 runs both rows over 3 + 1 and 2 + 1 tokens, step 2 the first alone over 3 + 2.
    workload = Workload([[0, 0, 0], [0, 0]], [3, 2])
    assert decode_floor(COST, RATES, workload) == pytest.approx((24 + 7 * 0.8) + (24 + 5 * 0.8))
    assert decode_floor(COST, RATES, Workload([[0]], [1])) == 0.0


@pytest.mark.parametrize(
    ("name", "num_seqs", "ms"),
    [
        ("qwen3-0.6b", 1, 0.289),  # 0.2785 of weights, and 384 tokens of KV on average
        ("qwen3-0.6b", 64, 0.718),
        ("qwen3-0.6b", 256, 2.143),  # products are bound by arithmetic: 0.387
        ("qwen3-8b", 1, 3.55),
        ("qwen3-8b", 64, 4.10),
    ],
)
def test_decode_steps_of_real_models(name: str, num_seqs: int, ms: float) -> None:
    new_tokens = 512 if num_seqs == 1 else 256
    workload = uniform(151936, num_seqs, 128, new_tokens)
    step = 1000 * decode_floor(cost_of(name), Rates(), workload) / (new_tokens - 1)
    assert step == pytest.approx(ms, rel=2e-3)


def test_the_usual_workload_reads_14_terabytes_of_kv() -> None:
    workload, cost = mixed(151936), cost_of("qwen3-0.6b")
    no_weights = ModelCost(0, 0, cost.kv_bytes, 0, 2)
    kv_bytes = decode_floor(no_weights, Rates(1.0, 1.0), workload)
    assert kv_bytes == pytest.approx(13.854e12, rel=1e-4)
    seconds = prefill_floor(cost, Rates(), workload.prompt_lens)
    seconds += decode_floor(cost, Rates(), workload)
    assert workload.num_new_tokens / seconds == pytest.approx(36_000, rel=0.02)


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
