"""Embeddings equal the pooled hidden states of transformers, regardless of the batch."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineError, RequestError
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES, runner_of
from tests.test_edited_requests import MODES, OPTIONS
from tests.test_equals_transformers import make_prompts
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")
POOLINGS = ("last", "mean")
EMBED_MODES = {**MODES, "chunked-ahead": {"max_num_batched_tokens": 7, "depth": 1}}


def wanted(checkpoint: TinyCheckpoint, prompt: list[int], pooling: str) -> np.ndarray:
    states = hidden_states(checkpoint.model, tuple(prompt))
    return (states[-1] if pooling == "last" else states.mean(0)).numpy()


@cache
@torch.inference_mode()
def hidden_states(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    states: torch.Tensor = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
    return states


def assert_right(
    checkpoint: TinyCheckpoint, prompts: list[list[int]], outputs: list[Any], pooling: str
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        right = wanted(checkpoint, prompt, pooling)
        assert np.abs(np.array(output.embedding) - right).max() < 1e-4 * np.abs(right).max()


@DEVICES
@pytest.mark.parametrize(
    ("mode", "pooling"),
    [(mode, POOLINGS[i % 2]) for i, mode in enumerate(EMBED_MODES)],
)
def test_they_equal_transformers(tiny: Any, device: str, mode: str, pooling: Any) -> None:
    """Runs twice, the second time with the prompts in the cache."""
    checkpoint, prompts = tiny("qwen3"), [[9], *make_prompts(), [*range(128)]]
    with LLM(checkpoint.path, device=device, **OPTIONS, **EMBED_MODES[mode]) as llm:
        for _ in range(2):
            outputs = llm.embed(prompts, pooling, normalize=False, use_tqdm=False)
            assert_right(checkpoint, prompts, outputs, pooling)
        scheduler = llm.engine.core.scheduler
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("variant", ["llama-tied-rope", "gemma3", "mistral"])
def test_families(tiny: Any, variant: str) -> None:
    checkpoint, prompts = tiny(variant), make_prompts()[:8]
    with LLM(checkpoint.path, device="cpu", **OPTIONS) as llm:
        for pooling in POOLINGS:
            outputs = llm.embed(prompts, pooling, normalize=False, use_tqdm=False)
            assert_right(checkpoint, prompts, outputs, pooling)


def test_two_ranks(tiny: Any) -> None:
    checkpoint, prompts = tiny("qwen3"), make_prompts()[:8]
    options = {**OPTIONS, "max_num_batched_tokens": 20}
    with engines_of(2), LLM(checkpoint.path, device="cpu", **options) as llm:
        for pooling in POOLINGS:
            outputs = llm.embed(prompts, pooling, normalize=False, use_tqdm=False)
            assert_right(checkpoint, prompts, outputs, pooling)


@DEVICES
@pytest.mark.parametrize("mode", ["ahead", "chunked", "preempted"])
def test_beside_answers(tiny: Any, device: str, mode: str) -> None:
    """Three threads embed, generate and score; each gets the same results as alone."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()[:10]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    vectors: dict[str, Any] = {}

    def embed(pooling: Any) -> None:
        many = llm.embed(prompts * 2, pooling, normalize=False, use_tqdm=False)
        vectors[pooling] = many

    with LLM(checkpoint.path, device=device, **OPTIONS, **MODES[mode]) as llm:
        alone = llm.generate(prompts, greedy, use_tqdm=False)
        threads = [threading.Thread(target=embed, args=(pooling,)) for pooling in POOLINGS]
        for thread in threads:
            thread.start()
        beside = llm.generate(prompts, greedy, use_tqdm=False)
        for thread in threads:
            thread.join()
        if mode == "preempted":
            assert llm.engine.core.scheduler.num_preemptions > 0
    for one, other, want in zip(alone, beside, checkpoint.answers(prompts, 16), strict=True):
        assert one.token_ids == other.token_ids == want
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            [(token_id, entry)] = mine.items()
            assert theirs[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
    for pooling in POOLINGS:
        assert_right(checkpoint, prompts * 2, vectors[pooling], pooling)


def test_chunks_add_up_after_preemption(tiny: Any) -> None:
    """Completions outgrow the KV cache while prompts are prefilled in small chunks."""
    checkpoint, prompts = tiny("qwen3"), [[*range(i, i + 100)] for i in range(3)]
    options = {**OPTIONS, "num_kvcache_blocks": 13, "max_num_batched_tokens": 8, "depth": 1}
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, priority=-1)
    with LLM(checkpoint.path, device="cpu", **options) as llm:
        for first in range(3):
            llm.add_request([first, 2, 3], long)
        outputs = llm.embed(prompts, "mean", normalize=False, use_tqdm=False)
        assert llm.engine.core.scheduler.num_preemptions > 0
    assert_right(checkpoint, prompts, outputs, "mean")


def test_states_are_widened_a_few_at_a_time(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("nanovllm.worker.prompt_logprobs.TOKENS_AT_A_TIME", 7)
    checkpoint, prompts = tiny("qwen3"), [[*range(70)], [3], [*range(14)], [*range(15)], [5, 6]]
    with LLM(checkpoint.path, device="cpu", **OPTIONS) as llm:
        outputs = llm.embed(prompts, "mean", normalize=False, use_tqdm=False)
    assert_right(checkpoint, prompts, outputs, "mean")


def test_last_takes_cached_blocks_and_mean_none(tiny: Any) -> None:
    """Both kinds fill the cache for other requests."""
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        sizes = []
        run = runner_of(llm).run
        runner_of(llm).run = lambda plan: (sizes.append(int(plan.counts.sum())), run(plan))[1]
        for pooling in ("last", "last", "mean", "last"):
            llm.embed([[*range(50)]], pooling, use_tqdm=False)  # type: ignore[arg-type]
        llm.embed({"prompt_token_ids": [*range(50)], "cache_salt": "a"}, use_tqdm=False)
    assert sizes == [50, 2, 50, 2, 50]


def test_vectors_have_length_one_unless_told_otherwise(tiny: Any) -> None:
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [unit] = llm.embed([1, 2, 3], use_tqdm=False)
        [raw] = llm.embed([1, 2, 3], normalize=False, use_tqdm=False)
    length = np.linalg.norm(raw.embedding)
    assert length > 2
    assert np.linalg.norm(unit.embedding) == pytest.approx(1, abs=1e-6)
    assert unit.embedding == pytest.approx(np.array(raw.embedding) / length, abs=1e-6)
    assert all(type(number) is float for number in unit.embedding)


def test_bad_prompts_are_named(tiny: Any) -> None:
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        with pytest.raises(RequestError, match=r"prompts\[1\]: prompt must be at least one token"):
            llm.embed([[1], []], use_tqdm=False)
        with pytest.raises(RequestError, match="has 129 tokens, but only 128 fit; shorten"):
            llm.embed([1] * 129, use_tqdm=False)
        with pytest.raises(RequestError, match="outside the model's vocabulary"):
            llm.embed([10**6], use_tqdm=False)
        with pytest.raises(RequestError, match='pooling must be "last" or "mean", got \'max\''):
            llm.embed([1], "max", use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r'pooling must be "last" or "mean", got \(1, 2\)'):
            llm.embed([1], (1, 2), use_tqdm=False)  # type: ignore[arg-type]
        assert llm.embed([], use_tqdm=False) == []
        assert llm.is_finished()


def test_states_that_are_no_numbers_are_an_error(tiny: Any) -> None:
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        with torch.inference_mode():
            runner_of(llm).eager.model.model.norm.weight[3] = torch.nan
        with pytest.raises(EngineError, match="hidden states are NaN or infinite"):
            llm.embed([[1, 2]], use_tqdm=False)
        assert llm.is_finished()
