"""A request with any parameter gets the same output alone and in a batch with all others."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from nanovllm import LLM, RequestOutput, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.devices import NEEDS_GPU
from tests.number_tokenizer import read_numbers
from tests.test_edited_requests import OPTIONS
from tests.test_equals_transformers import make_prompts
from tests.threaded_ranks import engines_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True, "max_num_seqs": 40},
    "no-cache": {"enable_prefix_caching": False, "depth": 1},
    "chunked-ahead": {"max_num_batched_tokens": 11, "depth": 1},
    "preempted-ahead": {"num_kvcache_blocks": 12, "depth": 1},
    "two-ranks": {"num_kvcache_blocks": 12, "depth": 1, "max_num_batched_tokens": 20},
}
FAST = ("plain", "chunked-ahead", "preempted-ahead")
CASES = [
    *(("cpu", mode) for mode in FAST),
    *(pytest.param("cpu", mode, marks=pytest.mark.slow) for mode in MODES if mode not in FAST),
    *(pytest.param("cuda", mode, marks=NEEDS_GPU) for mode in MODES if "ranks" not in mode),
]
EVEN, EOS = list(range(0, VOCAB_SIZE, 2)), tuple(range(0, VOCAB_SIZE, 5))


def shift(output_token_ids: list[int], logits: Tensor) -> Tensor:
    return logits.roll(1 + len(output_token_ids))


# For each field: options that use it, and other options that must give a different output.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 2.0}, {"temperature": 0}),
    "max_tokens": ({"max_tokens": 3}, {}),
    "ignore_eos": ({"ignore_eos": False}, {}),
    "top_k": ({"temperature": 9.0, "top_k": 3}, {"temperature": 9.0}),
    "top_p": ({"temperature": 9.0, "top_p": 0.5}, {"temperature": 9.0}),
    "min_p": ({"temperature": 9.0, "min_p": 0.3}, {"temperature": 9.0}),
    "seed": ({"temperature": 2.0, "seed": 5}, {"temperature": 2.0, "seed": 6}),
    "stop": ({"stop": ["1", "4"]}, {}),
    "stop_token_ids": ({"stop_token_ids": EVEN}, {}),
    "min_tokens": ({"min_tokens": 7, "stop_token_ids": EVEN}, {"stop_token_ids": EVEN}),
    "skip_special_tokens": ({"skip_special_tokens": False}, {}),
    "presence_penalty": ({"temperature": 9.0, "presence_penalty": 2.0}, {"temperature": 9.0}),
    "frequency_penalty": ({"temperature": 9.0, "frequency_penalty": -2.0}, {"temperature": 9.0}),
    "repetition_penalty": ({"repetition_penalty": 3.0}, {}),
    "logit_bias": ({"logit_bias": {3: 40.0, 4: 39.0}}, {}),
    "allowed_token_ids": ({"allowed_token_ids": range(20, 60)}, {}),
    "bad_words": ({"bad_words": [str(i) for i in range(90)]}, {}),
    "include_stop_str_in_output": (
        {"stop": ["1", "4"], "include_stop_str_in_output": True},
        {"stop": ["1", "4"]},
    ),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 4}, {}),
    "priority": ({"priority": 3}, {"temperature": 2.0}),
    "n": ({"temperature": 2.0, "n": 4}, {"temperature": 2.0, "seed": 99}),
    "logprobs": ({"logprobs": 4}, {}),
    "prompt_logprobs": ({"prompt_logprobs": 2}, {}),
    "logits_processors": ({"logits_processors": [shift]}, {}),
}
COMBINED: dict[str, Any] = {
    "temperature": 3.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "stop": ["99"],
    "stop_token_ids": [7, 8],
    "min_tokens": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 2.0},
    "allowed_token_ids": range(0, VOCAB_SIZE, 3),
    "bad_words": ["3", "6 9"],
    "n": 3,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logits_processors": [shift, shift],
}


def make_params(asked: dict[str, Any]) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "seed": 1}
    return SamplingParams(**{**usual, **asked})


ASKED = [*(make_params(asked) for asked, _ in FEATURES.values()), make_params(COMBINED)]
PLAIN = make_params({})


def summary(output: RequestOutput) -> list[Any]:
    """Return the parts of an output that must be equal; rounding changes logprobs."""
    best = [output.prompt_token_ids, output.text, output.finish_reason, output.error]
    return [best, [(each.token_ids, each.text, each.stop_reason) for each in output.outputs]]


def logprobs_of(output: RequestOutput) -> list[tuple[int, float]]:
    positions = [entries for each in output.outputs for entries in each.logprobs or ()]
    positions += [entries for entries in output.prompt_logprobs or () if entries]
    return [(key, entry.logprob) for entries in positions for key, entry in entries.items()]


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def prompts_for(number: int) -> list[list[int]]:
    prompts = make_prompts()[2:]
    return [prompts[i % len(prompts)] for i in range(number)]


@pytest.fixture(scope="module")
def alone(tiny: Any) -> Any:
    """Return each request's output when it runs alone; random numbers depend on the device."""

    @cache
    def answers(device: str) -> list[RequestOutput]:
        with LLM(tiny("qwen3").path, device=device, **OPTIONS, enable_prefix_caching=False) as llm:
            read_numbers(llm, EOS)
            pairs = zip(prompts_for(len(ASKED)), ASKED, strict=True)
            return [run(llm, [prompt], [params])[0] for prompt, params in pairs]

    return answers


def test_every_field_is_here() -> None:
    elsewhere = {"structured_outputs"}  # tested in test_structured.py, with a real tokenizer
    assert {field.name for field in fields(SamplingParams)} == {*FEATURES, *elsewhere}


def test_each_changes_something(tiny: Any, alone: Any) -> None:
    others = [make_params(other) for _, other in FEATURES.values()]
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        read_numbers(llm, EOS)
        outputs = run(llm, prompts_for(len(others)), others)
    for name, one, other in zip(FEATURES, alone("cpu"), outputs, strict=False):
        assert summary(one) != summary(other) or logprobs_of(one) != logprobs_of(other), name


@pytest.mark.parametrize(("device", "mode"), CASES)
def test_all_side_by_side(tiny: Any, alone: Any, device: str, mode: str) -> None:
    """Every other row has no options. Runs twice, the second time with cached prompts."""
    checkpoint, prompts = tiny("qwen3"), prompts_for(len(ASKED))
    params = [param for asked in ASKED for param in (asked, PLAIN)]
    doubled = [prompt for prompt in prompts for _ in range(2)]
    want = checkpoint.answers(prompts, PLAIN.max_tokens)
    ranks = engines_of(2) if mode == "two-ranks" else nullcontext()
    with ranks, LLM(checkpoint.path, device=device, **{**OPTIONS, **MODES[mode]}) as llm:
        read_numbers(llm, EOS)
        for _ in range(2):
            outputs = run(llm, doubled, params)
            assert [output.token_ids for output in outputs[1::2]] == want
            for one, other, asked in zip(alone(device), outputs[::2], ASKED, strict=True):
                assert summary(one) == summary(other), asked
                mine, theirs = logprobs_of(one), logprobs_of(other)
                assert [key for key, _ in mine] == [key for key, _ in theirs]
                values = [value for _, value in mine]
                assert values == pytest.approx([value for _, value in theirs], abs=1e-3)
        is_preempted = llm.engine.core.scheduler.num_preemptions > 0
    assert is_preempted or "num_kvcache_blocks" not in MODES[mode]


def test_eight_samples_equal_eight_requests(tiny: Any) -> None:
    """Uses all options that can be combined; the requests have consecutive seeds."""
    asked = replace(make_params(COMBINED), n=8, prompt_logprobs=None)
    ones = [replace(asked, n=1, seed=1 + i) for i in range(8)]
    prompt = prompts_for(9)[8]
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS, depth=1) as llm:
        read_numbers(llm, EOS)
        [together] = run(llm, [prompt], [asked])
        apart = run(llm, [prompt] * 8, ones)
    assert [each.token_ids for each in together.outputs] == [each.token_ids for each in apart]
    assert [each.text for each in together.outputs] == [each.text for each in apart]
