"""The default model from its GGUF file equals transformers on the same dequantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engines import load_transformers
from nanovllm import LLM, SamplingParams
from tests.checkpoints import MIN_GAP

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "What is 17 plus 25?",
    "Write a haiku about the sea.",
]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_transformers("smollm2", "cpu", "float32")


@pytest.mark.slow
def test_equals_transformers_token_for_token(llm: LLM, model: Any) -> None:
    prompts = llm.apply_chat_template([[{"role": "user", "content": q}] for q in QUESTIONS])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)

    for prompt, output in zip(prompts, outputs, strict=True):
        # Verify greedy decoding in one pass: each token is the argmax after its predecessors.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
        top2 = logits[len(prompt) - 1 : -1].topk(2)
        assert (top2.values[:, 0] - top2.values[:, 1]).min() > MIN_GAP
        assert top2.indices[:, 0].tolist() == output.token_ids
        assert len(output.token_ids) == MAX_TOKENS


@pytest.mark.slow
def test_logprobs_equal_transformers(llm: LLM, model: Any) -> None:
    """Top tokens of prompts and completions have the same order and the same texts."""
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    for output in llm.generate(QUESTIONS, params, use_tqdm=False):
        ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            right = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        found = [*output.prompt_logprobs[1:], *output.logprobs]
        for entries, token_id, wanted in zip(found, ids[1:], right, strict=True):
            assert entries is not None
            best = wanted.topk(5).indices.tolist()
            assert list(entries) == list(dict.fromkeys([token_id, *best]))
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(wanted[each].item(), abs=1e-3)
                assert entry.rank == 1 + int((wanted > wanted[each]).sum())
                assert entry.decoded_token == tokenizer.decode([each])


@pytest.mark.slow
def test_embeddings_equal_transformers(llm: LLM, model: Any) -> None:
    for pooling in ("last", "mean"):
        for output in llm.embed(QUESTIONS, pooling, use_tqdm=False):
            with torch.inference_mode():
                states = model.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            right = (states[-1] if pooling == "last" else states.mean(0)).numpy()
            right = right / np.linalg.norm(right)
            assert output.embedding == pytest.approx(right, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_it_chats_sensibly(dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM("smollm2", dtype=dtype, max_model_len=256, max_num_seqs=4) as llm:
        [output] = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params, use_tqdm=False)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"


@pytest.mark.slow
def test_no_two_tokens_are_equally_likely_in_bfloat16() -> None:
    prompts = [f"Question {i}: what is {i} times {i + 7}? Answer:" for i in range(200)]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2)
    with LLM("smollm2", dtype="bfloat16", max_model_len=256) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        for best in output.logprobs or ():
            assert len({entry.logprob for entry in best.values()}) == 2
