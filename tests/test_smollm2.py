"""The default model from its GGUF file equals transformers on the same dequantised weights."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cpu_vs_transformers import load_transformers
from nanovllm import LLM, SamplingParams
from tests.checkpoints import TinyCheckpoint

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


def test_equals_transformers_token_for_token(llm: LLM) -> None:
    prompts = llm.apply_chat_template([[{"role": "user", "content": q}] for q in QUESTIONS])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)

    model = load_transformers("float32")
    model.generation_config.eos_token_id = None
    reference = TinyCheckpoint(path=None, model=model)  # type: ignore[arg-type]
    with torch.inference_mode():
        want = [reference.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert [output.token_ids for output in outputs] == want


def test_it_chats_sensibly(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    [output] = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params, use_tqdm=False)
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
