"""The floor of a workload: a lower bound on its time from a device's rates (roofline model).

Only matrix products, the KV cache, recurrent states and attention are counted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.workloads import Workload
from nanovllm.config import ExpertsConfig, ModelConfig, RecurrentConfig
from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rates:
    """Sustained rates; the defaults are an H200's device copy and bf16 8192^3 matmul."""

    bytes_per_second: float = 4.28e12
    flops_per_second: float = 788e12

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e12:g} TB/s, {self.flops_per_second / 1e12:g} TFLOP/s"


def rates_of(device_name: str, bandwidth: float | None, tflops: float | None) -> Rates | None:
    """Return the given rates (TB/s, TFLOP/s); on an H200, its own by default; None if unknown."""
    given = [bandwidth, tflops]
    if not all(rate is None or 0 < rate < math.inf for rate in given):
        raise ConfigError(f"--bandwidth and --tflops must be above 0, got {bandwidth}, {tflops}")
    if "H200" not in device_name and None in given:
        if given == [None, None]:
            return None
        raise ConfigError(
            f"the rates of this device ({device_name}) are unknown: give both --bandwidth "
            "and --tflops, or neither"
        )
    default = Rates()
    return Rates(
        default.bytes_per_second if bandwidth is None else bandwidth * 1e12,
        default.flops_per_second if tflops is None else tflops * 1e12,
    )


def add_rate_options(parser: argparse.ArgumentParser) -> None:
    title = "floor (known for an H200; on other devices, give both)"
    add = parser.add_argument_group(title).add_argument
    bandwidth, tflops = (rate / 1e12 for rate in asdict(Rates()).values())
    text = f"sustained TB/s of memory (default: on an H200, {bandwidth:g})"
    add("--bandwidth", type=float, metavar="X", help=text)
    text = f"sustained TFLOP/s of matrix products (default: on an H200, {tflops:g})"
    add("--tflops", type=float, metavar="X", help=text)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model costs per token or per step, counted from its config."""

    layer_weights: int  # elements of the matrices of all layers, used by every token
    head_weights: int  # elements of the LM head, used only for sampling
    kv_bytes: int  # bytes per token, all layers
    attention_flops: int  # of one query token with one key token, all layers and heads
    itemsize: int
    expert_weights: int = 0  # elements of one expert in all layers; a token uses top_k experts
    num_experts: int = 1
    top_k: int = 0
    state_bytes: int = 0  # recurrent states of a sequence: a step reads and writes them

    def weight_bytes(self, num_tokens: int) -> float:
        """Return the weight bytes read in a step, without the few rows of an untied embedding.

        The number of experts is its expectation if tokens choose evenly and independently.
        """
        num_used = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)
        elements = self.layer_weights + self.head_weights + num_used * self.expert_weights
        return elements * self.itemsize


def model_cost(config: ModelConfig, itemsize: int, kv_cache_dtype: str = "auto") -> ModelCost:
    row_bytes = config.head_dim * itemsize if kv_cache_dtype == "auto" else config.head_dim + 1
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    num_q = 3 if config.has_output_gate else 2  # q, the gate, and the output projection
    attention = config.hidden_size * (num_q * q_size + 2 * kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    recurrent = config.recurrent
    num_recurrent = 0 if recurrent is None else len(recurrent.layers)
    num_attention = len(config.layers) - num_recurrent
    # The KV cache of layers with a sliding window is not counted.
    num_whole = sum(layer.window is None for layer in config.layers) - num_recurrent
    cost = ModelCost(
        layer_weights=num_attention * attention + len(config.layers) * mlp,
        head_weights=config.vocab_size * config.hidden_size,
        kv_bytes=num_whole * 2 * config.num_kv_heads * row_bytes,
        attention_flops=num_whole * 4 * q_size,
        itemsize=itemsize,
    )
    if recurrent is not None:
        cost = _with_recurrent(cost, config.hidden_size, recurrent)
    return cost if config.experts is None else _with_experts(cost, config, config.experts, mlp)


def _with_recurrent(cost: ModelCost, hidden_size: int, config: RecurrentConfig) -> ModelCost:
    k, v = config.num_key_heads * config.key_dim, config.num_value_heads * config.value_dim
    projections = hidden_size * (2 * k + 3 * v + 2 * config.num_value_heads)
    state_bytes = 4 * config.key_dim * v  # float32
    return replace(
        cost,
        layer_weights=cost.layer_weights + len(config.layers) * projections,
        state_bytes=2 * len(config.layers) * state_bytes,
    )


def _with_experts(
    cost: ModelCost, config: ModelConfig, experts: ExpertsConfig, mlp: int
) -> ModelCost:
    num_sparse = len(config.layers) - len(experts.dense_layers)
    router = config.hidden_size * experts.num_experts
    shared = 3 * config.hidden_size * experts.shared_size
    return replace(
        cost,
        layer_weights=cost.layer_weights + num_sparse * (router + shared - mlp),
        expert_weights=num_sparse * 3 * config.hidden_size * experts.size,
        num_experts=experts.num_experts,
        top_k=experts.top_k,
    )


def step_floor(
    cost: ModelCost, rates: Rates, num_tokens: int, num_sampled: int, num_kv: int, num_pairs: int
) -> float:
    """Return the minimum seconds of a step: products, then attention; memory- or compute-bound.

    `num_kv` counts tokens read from the KV cache, `num_pairs` pairs of a query and a key token.
    """
    per_token = cost.layer_weights + cost.top_k * cost.expert_weights
    product_flops = 2 * (per_token * num_tokens + cost.head_weights * num_sampled)
    return max(
        cost.weight_bytes(num_tokens) / rates.bytes_per_second,
        product_flops / rates.flops_per_second,
    ) + max(
        (cost.kv_bytes * num_kv + cost.state_bytes * num_sampled) / rates.bytes_per_second,
        cost.attention_flops * num_pairs / rates.flops_per_second,
    )


def prefill_floor(
    cost: ModelCost, rates: Rates, prompt_lens: Sequence[int], num_cached: int = 0
) -> float:
    """Return the minimum seconds to all first tokens; `num_cached` tokens per prompt are cached."""
    num_tokens = sum(length - num_cached for length in prompt_lens)
    pairs = sum(n * (n + 1) // 2 - num_cached * (num_cached + 1) // 2 for n in prompt_lens)
    return step_floor(cost, rates, num_tokens, len(prompt_lens), sum(prompt_lens), pairs)


def decode_floor(cost: ModelCost, rates: Rates, workload: Workload) -> float:
    """Return the minimum seconds from the first tokens to the end, if all prompts run together."""
    rows = list(zip(workload.prompt_lens, workload.max_tokens, strict=True))
    seconds = 0.0
    for step in range(1, max(workload.max_tokens)):
        contexts = [length + step for length, max_tokens in rows if max_tokens > step]
        num_rows, num_kv = len(contexts), sum(contexts)
        seconds += step_floor(cost, rates, num_rows, num_rows, num_kv, num_kv)
    return seconds
