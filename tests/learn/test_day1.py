"""Day 1: the forward pass and greedy decoding equal transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import day1 as solutions
import pytest
import torch

import day1_forward as day1
from common import Model, load_model
from tests.checkpoints import VOCAB_SIZE, TinyCheckpoint

PROMPTS = [[5, 6, 7], [9], list(range(3, 40)), random.Random(0).choices(range(VOCAB_SIZE), k=21)]


def test_equals_transformers(tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model) -> None:
    outputs = [day1.generate(tiny_llama, prompt, max_tokens=12) for prompt in PROMPTS]
    assert outputs == tiny("llama").answers(PROMPTS, max_tokens=12)


def test_hidden_states_give_the_logits_of_transformers(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    ids = torch.tensor(PROMPTS[2])
    with torch.inference_mode():
        hidden = day1.forward(tiny_llama, ids, torch.arange(len(ids)), day1.attend_to_input)
        right = tiny("llama").model(ids[None]).logits[0]
    logits = day1.compute_logits(tiny_llama, hidden)
    torch.testing.assert_close(logits, right, atol=5e-4, rtol=0)


def test_other_models_are_refused(tiny: Callable[[str], TinyCheckpoint]) -> None:
    for variant in ("qwen3", "llama-tied-rope", "llama-mha-bias"):
        with pytest.raises(SystemExit, match="only run plain models of llama"):
            load_model(str(tiny(variant).path))


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    model, tokenizer = smollm2
    printed = run_program(day1, MAX_TOKENS=6)
    assert "30 layers, 9 query heads on 3 kv heads of 64 numbers, 134,515,008 parameters" in printed
    assert "6 new tokens ran 57 tokens through the model, but only 12 are different" in printed
    assert "  2  ' Neil' 29%       ' Buzz' 14%" in printed
    prompt_ids = tokenizer.encode(day1.PROMPT)
    output_ids = day1.generate(model, prompt_ids, max_tokens=6)
    assert f"The text: {tokenizer.decode(prompt_ids + output_ids)!r}" in printed
    assert_greedy(prompt_ids, output_ids)


def test_exercise_1_prompt_logprobs(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    for prompt in PROMPTS:
        right = tiny("llama").logprobs(prompt)[range(len(prompt) - 1), prompt[1:]]
        found = solutions.prompt_logprobs(tiny_llama, prompt)
        assert found == pytest.approx(right.tolist(), abs=1e-4)


def test_exercise_2_qwen3(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny("qwen3")
    model = load_model(str(checkpoint.path), families=("qwen3",))
    monkeypatch.setattr(day1, "project_qkv", solutions.project_qkv)
    outputs = [day1.generate(model, prompt, max_tokens=8) for prompt in PROMPTS[:3]]
    assert outputs == checkpoint.answers(PROMPTS[:3], max_tokens=8)
    again = day1.generate(tiny_llama, PROMPTS[0], max_tokens=8)
    assert again == tiny("llama").generate(PROMPTS[0], max_tokens=8)
