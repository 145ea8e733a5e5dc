"""Every CUDA kernel in small shapes, and an engine without graphs, for `make sanitize`.

Memcheck makes kernels many times slower, and sees allocations only if torch does not cache them,
which rules out graphs.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanovllm import LLM
from tests.devices import NEEDS_GPU
from tests.devices.cuda.kernels.interpreted import (
    delta_net_cases,
    experts_cases,
    fused_cases,
    paged_attention_cases,
    quantized_cases,
    sampling_cases,
)
from tests.test_equals_transformers import GREEDY, make_prompts
from tests.test_sampled_requests import mixed_params

pytestmark = NEEDS_GPU

DTYPES = [torch.bfloat16, torch.float32]
FUSED_CHECKS = [check for name, check in vars(fused_cases).items() if name.startswith("check_")]
SAMPLING_CASES = [
    case
    for case in sampling_cases.CASES
    if case.func not in (sampling_cases.check_kind, sampling_cases.check_both_searches)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", FUSED_CHECKS, ids=lambda check: check.__name__)
def test_fused(check: Any, dtype: torch.dtype) -> None:
    check(*[dtype] * ("dtype" in signature(check).parameters), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype) -> None:
    """Routing alone and after a norm, unsorted and sorted (token, expert) pairs, every tile."""
    experts_cases.check_routing(dtype, "cuda")
    experts_cases.check_experts(dtype, "cuda")
    experts_cases.check_every_tile(dtype, "cuda")
    experts_cases.check_after_norm("cuda")
    experts_cases.check_shared_expert(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_delta_net(dtype: torch.dtype) -> None:
    delta_net_cases.check_gated_delta_net(dtype, "cuda", delta_net_cases.SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantized_weights(dtype: torch.dtype) -> None:
    """Int4 and FP8 weights with scales per output and per group: every kernel that reads them."""
    quantized_cases.check_products(dtype, "cuda")
    quantized_cases.check_partial_sums(dtype, "cuda")
    quantized_cases.check_dequantize(dtype, "cuda")
    quantized_cases.check_quantized_rows(dtype, "cuda")
    quantized_cases.check_normed_rows(dtype, "cuda")
    quantized_cases.check_scaled_sums(dtype, "cuda")
    quantized_cases.check_every_fp8_code("cuda")


@pytest.mark.parametrize("kind", ["decode", "prefill", "tma", "shared"])
def test_attention(kind: str) -> None:
    """Contexts with and without split KV, for every head dimension and dtype."""
    if kind == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    drawn = paged_attention_cases.sample(kind, 5, DTYPES, paged_attention_cases.SMALL)
    for case in paged_attention_cases.edge_cases(kind) + drawn:
        paged_attention_cases.verify(case, kind, "cuda")


@pytest.mark.parametrize("kind", ["decode", "prefill", "shared"])
def test_attention_over_fp8_keys(kind: str) -> None:
    for case in paged_attention_cases.sample(kind, 4, DTYPES, paged_attention_cases.SMALL):
        paged_attention_cases.verify(replace(case, is_fp8=True), kind, "cuda")


@pytest.mark.parametrize("case", SAMPLING_CASES, ids=lambda case: case.func.__name__)
def test_sampling(case: Any) -> None:
    case.func(*case.args[:-1], "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_with_every_cut(dtype: torch.dtype) -> None:
    sampling_cases.check_both_searches(dtype, "cuda")
    for kind in ("usual", "flat", "masked"):
        logits = sampling_cases.KINDS[kind](9, 5003).to(dtype)
        batch = sampling_cases.make_batch(logits, sampling_cases.make_rows(9, 0), "cuda")
        sampling_cases.check_full(batch, max_different=1)


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_persistent_step(bits: int, has_experts: bool) -> None:
    """A few contexts, shorter and longer than the keys of one CTA; also several rows."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from nanovllm.devices.cuda.persistent.sizes import NO_EXPERTS, ExpertsShape, StepShape
    from tests.devices.cuda.persistent.random_steps import RandomStep, Variant

    experts = ExpertsShape(6, 2, 256) if has_experts else NO_EXPERTS
    shape = StepShape(256, 4, 2, 128, 512, 1000, bits, experts)
    num_layers = 1 if has_experts else 2  # a near tie may choose a different expert
    step = RandomStep(shape, Variant(num_layers, block_size=32), 700, 4)
    lengths = {1: 1, 2: 33, 3: 650, 4: 129}
    batches = [([slot], False) for slot in lengths]
    if not has_experts:
        batches += [([1, 2], False), ([3, 0, 4, 1], False), ([3, 3, 3, 0], True)]
        batches += [([4] * shape.rows[-1], True)]
    for slots, verifies in batches:
        kernel, plain, cache = step.errors(slots, lengths, verifies)
        assert kernel < 1.3 * plain + 1e-4, slots
        assert cache < 0.01, slots


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_without_graphs(tiny: Any, dtype: str, kv_cache_dtype: str) -> None:
    """Prefill chunks, prefix hits, preemption, one and several rows, and every kind of sampling."""
    prompts = make_prompts()
    with LLM(
        tiny("qwen3").path,
        device="cuda",
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kvcache_block_size=16,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_kvcache_blocks=10,
    ) as llm:
        for params in (mixed_params(len(prompts)), [GREEDY] * len(prompts)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(output.token_ids for output in outputs)
        assert llm.engine.core.scheduler.num_preemptions > 0
