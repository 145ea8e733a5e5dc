"""Day 2: the KV cache changes the work, not the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import day2 as solutions
import torch

import day2_kv_cache as day2
from common import Model, load_model
from tests.checkpoints import WINDOW, TinyCheckpoint
from tests.learn.test_day1 import PROMPTS


def test_equals_transformers(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    outputs = [day2.generate(tiny_llama, prompt, max_tokens=12) for prompt in PROMPTS]
    assert outputs == tiny("llama").answers(PROMPTS, max_tokens=12)


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    model, tokenizer = smollm2
    printed = run_program(day2, CONTEXT_LENGTHS=(4, 8), MAX_TOKENS=6)
    assert "Both chose the same tokens. Day 1 ran 57 tokens, day 2 ran 12." in printed
    assert "The cache takes 46,080 bytes per token" in printed
    assert "reads all weights, 538 MB" in printed
    prompt_ids = tokenizer.encode(day2.PROMPT)
    assert_greedy(prompt_ids, day2.generate(model, prompt_ids, max_tokens=12))


def test_exercise_1_chunks(tiny_llama: Model) -> None:
    prompt = PROMPTS[2]
    whole = day2.run_tokens(tiny_llama, day2.KVCache(tiny_llama.config, 64), prompt)
    for chunk_size in (1, 5, len(prompt), 100):
        cache = day2.KVCache(tiny_llama.config, 64)
        logits = solutions.prefill_in_chunks(tiny_llama, cache, prompt, chunk_size)
        torch.testing.assert_close(logits, whole, atol=5e-4, rtol=0)
        assert cache.length == len(prompt)


def test_exercise_2_window(tiny: Callable[[str], TinyCheckpoint]) -> None:
    checkpoint = tiny("mistral")
    model = load_model(str(checkpoint.path), families=("mistral",))
    prompts = [PROMPTS[0], PROMPTS[2]]  # the second is longer than the window
    outputs = [solutions.generate_in_window(model, prompt, 24, WINDOW) for prompt in prompts]
    assert outputs == checkpoint.answers(prompts, max_tokens=24)
