"""The default model from its GGUF file equals transformers on the same dequantised weights."""

from __future__ import annotations

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


@pytest.mark.slow
def test_equals_transformers_token_for_token(llm: LLM) -> None:
    prompts = llm.apply_chat_template([[{"role": "user", "content": q}] for q in QUESTIONS])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)

    model = load_transformers("smollm2", "cpu", "float32")
    for prompt, output in zip(prompts, outputs, strict=True):
        # Greedy decoding, all of its steps in one: each token is what its predecessors lead to.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
        top2 = logits[len(prompt) - 1 : -1].topk(2)
        assert (top2.values[:, 0] - top2.values[:, 1]).min() > MIN_GAP
        assert top2.indices[:, 0].tolist() == output.token_ids
        assert len(output.token_ids) == MAX_TOKENS


def test_it_chats_sensibly(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    [output] = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params, use_tqdm=False)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
