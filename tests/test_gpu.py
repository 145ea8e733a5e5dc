"""The engine on CUDA: float32 tokens equal those of transformers, and a seed reproduces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VARIANTS
from tests.test_equals_transformers import GREEDY, MAX_TOKENS, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "depth-0": {"depth": 0},
    "chunked-no-cache": {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "preempted-chunked": {"num_kvcache_blocks": 7, "max_num_batched_tokens": 9},
    "few-slots": {"max_num_seqs": 3},
}
OPTIONS = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.2,
    "device": "cuda",
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tiny: Any) -> tuple[str, list[list[int]], list[list[int]]]:
    checkpoint = tiny(request.param)
    prompts = make_prompts()
    return str(checkpoint.path), prompts, [checkpoint.generate(p, MAX_TOKENS) for p in prompts]


@pytest.mark.parametrize("mode", list(MODES))
def test_equals_transformers(case: Any, mode: str) -> None:
    path, prompts, want = case
    with LLM(path, **{**OPTIONS, **MODES[mode]}) as llm:
        for _ in range(2):  # the second time everything is cached
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.token_ids for output in outputs] == want
        llm.engine.core.scheduler.check()


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
def test_block_sizes(tiny: Any, block_size: int) -> None:
    checkpoint = tiny("qwen3")
    prompts = make_prompts()[5:12]
    want = [checkpoint.generate(p, MAX_TOKENS) for p in prompts]
    with LLM(str(checkpoint.path), **{**OPTIONS, "kvcache_block_size": block_size}) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_batches_of_1_to_300(tiny: Any, caching: bool) -> None:
    """Sequences enter and leave, so that graphs of every size run, padded and full."""
    checkpoint = tiny("qwen3")
    prompts = make_prompts()
    want = [checkpoint.generate(p, MAX_TOKENS) for p in prompts]
    rng = random.Random(0)
    picks = [(rng.randrange(len(prompts)), rng.randint(1, MAX_TOKENS)) for _ in range(300)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in picks]
    options = {**OPTIONS, "max_num_seqs": 300, "enable_prefix_caching": caching}
    with LLM(str(checkpoint.path), **options) as llm:
        outputs = llm.generate([prompts[i] for i, _ in picks], params, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [want[i][:n] for i, n in picks]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tiny: Any) -> None:
    path = str(tiny("qwen3").path)
    prompts = make_prompts()[:8]
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=12, ignore_eos=True, top_k=5 * i, top_p=1 - 0.05 * i
        )
        for i in range(8)
    ]
    with LLM(path, **OPTIONS) as llm:
        together = [o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        alone = [
            llm.generate([prompt], param, use_tqdm=False)[0].token_ids
            for prompt, param in zip(prompts, params, strict=True)
        ]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) > 6
