"""SamplingParams: invalid values raise errors that name the field."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError

NAN = float("nan")
BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 101, NAN, float("inf"), 10**400, "x", None, True],
    "max_tokens": [0, -1, 1.5, "8", True],
    "ignore_eos": ["no", 1, None],
    "top_k": [-2, 1.5, "8", None, True],
    "top_p": [0, -0.1, 1.1, NAN, "x", None, True],
    "min_p": [-0.1, 1.1, NAN, "x", None, True],
    "seed": [-(2**63) - 1, 2**64, 1.5, "x", True],
    "stop": ["", ["a", ""], [1], [None], 5],
    "stop_token_ids": [[-1], [1.5], ["x"], [None], [True], 5],
    "min_tokens": [-1, 65, 1.5, "x", None],
    "skip_special_tokens": ["no", 1, None],
    "presence_penalty": [2.1, -2.1, NAN, "x", None, True],
    "frequency_penalty": [2.1, -3, NAN, "x", None, True],
    "repetition_penalty": [0, -1, 101, NAN, "x", None, True],
    "logit_bias": [
        *({1: bias} for bias in (101, -101, NAN, 10**400, "5", None)),
        *({key: 1} for key in (-1, "a", 1.7, True)),
        {1: 5, "1": 4},
        3,
    ],
    "allowed_token_ids": [[], [-4], [True], "abc", 3],
    "bad_words": [[""], [3], 3],
    "include_stop_str_in_output": [1, "no", None],
    "truncate_prompt_tokens": [0, -1, 1.5, "x", True],
    "priority": [1.5, "x", None, True],
    "n": [0, -1, 10_001, 1.5, None, True],
    "logprobs": [-1, 101, 2.5, True, "3"],
    "prompt_logprobs": [-1, 101, 2.5, True, "3"],
    "logits_processors": [3, [3], "a:b", ["a"], [None], ["a:b c"], {"a": 1}],
    "structured_outputs": ["x", 3, {}, {"json": {}, "regex": "a"}, {"after": "a"}, {"x": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
        ({"repetition_penalty": NAN}, "repetition_penalty must be in [0.01, 100], got nan"),
        ({"logit_bias": {1: 101}}, "logit_bias must be numbers in [-100, 100] keyed by token id"),
        (
            {"logit_bias": {1.7: 1}},
            "keyed by token id, got {1.7: 1}",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one id, none below 0"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids must be items of type int"),
        ({"bad_words": [""]}, "bad_words must be non-empty strings"),
        ({"bad_words": [3]}, "bad_words must be items of type str"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, got 0"),
        ({"ignore_eos": 1}, "ignore_eos must be of type bool, got 1"),
        ({"logits_processors": ["a"]}, "as 'module:function', got ['a']"),
    ],
)
def test_messages_say_what_would_be_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**options)


def test_every_field_is_here() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(BAD)


def test_fields_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, or 0 with"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ConfigError, match=r"n must be in .* 1 with max_tokens=0"):
        SamplingParams(n=3, max_tokens=0, prompt_logprobs=1)
    with pytest.raises(ConfigError, match=r"min_tokens must be in \[0, max_tokens=4\]"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_values_at_the_border_are_accepted() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    assert hash(SamplingParams(logit_bias={7: 1})) == hash(SamplingParams(logit_bias={7: 1}))
    for seed in (0, -(2**63), 2**63 - 1, 2**63, 2**64 - 1):
        assert SamplingParams(seed=seed).seed == seed
    SamplingParams(temperature=0, top_p=1, min_p=1, max_tokens=1, min_tokens=1)
    SamplingParams(temperature=100, presence_penalty=-2, frequency_penalty=2, logprobs=100)
    SamplingParams(repetition_penalty=0.01, n=10_000, prompt_logprobs=0, logprobs=0, max_tokens=1)
