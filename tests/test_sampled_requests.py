"""Sampling in the engine, on every device: batching, truncation and min_tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.devices import DEVICES
from tests.test_equals_transformers import MAX_TOKENS, make_prompts

pytestmark = [pytest.mark.usefixtures("one_thread"), DEVICES]

OPTIONS = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.2,
    "skip_tokenizer_init": True,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": list(range(0, VOCAB_SIZE, 3))},
]


def mixed_params(num_prompts: int) -> list[SamplingParams]:
    """Return parameters of every kind in turn, each with its own seed."""
    return [
        SamplingParams(**KINDS[i % len(KINDS)], seed=i, max_tokens=12, ignore_eos=True)
        for i in range(num_prompts)
    ]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tiny: Any, device: str) -> None:
    prompts = make_prompts()
    params = mixed_params(len(prompts))
    with LLM(tiny("qwen3").path, device=device, **OPTIONS) as llm:
        together = generate(llm, prompts, params)
        alone = [generate(llm, [p], param)[0] for p, param in zip(prompts, params, strict=True)]
        reversed_order = generate(llm, prompts[::-1], params[::-1])[::-1]
    assert together == alone == reversed_order
    assert len({tuple(tokens) for tokens in together}) > len(prompts) - 3
    greedy = slice(0, None, len(KINDS))
    want = tiny("qwen3").answers(prompts[greedy], 12)
    assert together[greedy] == want


def test_cuts_that_leave_one_token_are_greedy(tiny: Any, device: str) -> None:
    """Runs beside rows with less truncation and with none."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()
    cuts: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 2.0},  # free: may generate any tokens
        {"temperature": 1.0, "top_p": 0.9},  # free
    ]
    params = [
        SamplingParams(**cuts[i % len(cuts)], max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(checkpoint.path, device=device, **OPTIONS) as llm:
        outputs = generate(llm, prompts, params)
    for i, want in enumerate(checkpoint.answers(prompts, MAX_TOKENS)):
        is_free = i % len(cuts) >= 5
        assert is_free or outputs[i] == want, params[i]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_min_tokens_rule_out_stop_tokens(tiny: Any, device: str, max_num_seqs: int) -> None:
    """Greedy, beside rows without a minimum; equals transformers with min_new_tokens."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()[:10]
    stop_token_ids = list(range(0, VOCAB_SIZE, 2))
    minimums = [0, 1, 5, 11, MAX_TOKENS, 0, 3, 7, 2, MAX_TOKENS - 1]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            min_tokens=minimum,
            stop_token_ids=stop_token_ids,
            ignore_eos=True,
        )
        for minimum in minimums
    ]
    options = {**OPTIONS, "max_num_seqs": max_num_seqs}
    with LLM(checkpoint.path, device=device, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, minimum, output in zip(prompts, minimums, outputs, strict=True):
        wanted = checkpoint.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=minimum,
            eos_token_id=stop_token_ids,
            pad_token_id=0,
        )
        assert output.token_ids == wanted[0, len(prompt) :].tolist()
        assert len(output.token_ids) >= max(minimum, 1)
        assert output.finish_reason == ("stop" if output.token_ids[-1] % 2 == 0 else "length")
