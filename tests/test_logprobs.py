"""Logprobs equal those of transformers, regardless of the other requests in a batch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.errors import RequestError
from nanovllm.ops.torch_logits import ROWS_AT_A_TIME, token_logprobs
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES
from tests.test_edited_requests import MODES, OPTIONS
from tests.test_equals_transformers import make_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0},
    {"temperature": 2.0, "top_k": 50, "logprobs": 20},
    {"temperature": 1.0, "logprobs": 1, "presence_penalty": 2.0, "logit_bias": {3: 50.0}},
    {"temperature": 0.9, "allowed_token_ids": [7, 8, 9], "logprobs": 2},
    {"temperature": 1.0},
]


def make_params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=5 + i, seed=i, ignore_eos=True, **asked)
        for i, asked in enumerate(ASKED)
    ]


def assert_right(checkpoint: TinyCheckpoint, output: RequestOutput, num_top: int | None) -> None:
    if num_top is None:
        assert output.logprobs is output.cumulative_logprob is None
        return
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    prompt, answer = output.prompt_token_ids, output.token_ids
    right = checkpoint.logprobs(prompt + answer)[len(prompt) - 1 : -1]
    total = 0.0
    for entries, token_id, wanted in zip(output.logprobs, answer, right, strict=True):
        order = wanted.argsort(descending=True).tolist()
        assert list(entries) == list(dict.fromkeys([token_id, *order[:num_top]]))
        for each, entry in entries.items():
            assert abs(entry.logprob - wanted[each].item()) < 1e-4
            assert entry.rank == order.index(each) + 1
            assert entry.decoded_token is None
        total += entries[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(total)


@DEVICES
@pytest.mark.parametrize("mode", list(MODES))
def test_they_are_the_models_own(tiny: Any, device: str, mode: str) -> None:
    """Runs twice, the second time from the prefix cache."""
    checkpoint, params = tiny("qwen3"), make_params()
    prompts = make_prompts()[: len(params)]
    with LLM(checkpoint.path, device=device, **OPTIONS, **MODES[mode]) as llm:
        for _ in range(2):
            for output, param in zip(
                llm.generate(prompts, params, use_tqdm=False), params, strict=True
            ):
                assert_right(checkpoint, output, param.logprobs)


@pytest.mark.parametrize("depth", [0, 1])
def test_streams_bring_them_with_their_tokens(tiny: Any, depth: int) -> None:
    params = SamplingParams(max_tokens=7, seed=1, ignore_eos=True, logprobs=2)
    with LLM(tiny("qwen3").path, device="cpu", depth=depth, **OPTIONS) as llm:
        pieces = list(llm.stream([[1, 2, 3]], params))
    streamed = [entries for piece in pieces for entries in piece.logprobs or []]
    assert pieces[-1].output is not None
    assert streamed == pieces[-1].output.logprobs
    assert [next(iter(entries)) for entries in streamed] == pieces[-1].output.token_ids


def test_many_rows_are_widened_a_few_at_a_time() -> None:
    # Each row is a permutation of distinct values: equal ones could be returned in any order.
    logits = torch.rand(2 * ROWS_AT_A_TIME + 3, 90).argsort(-1) / 10
    tokens = torch.randint(90, (len(logits),))
    ids, values, ranks = token_logprobs(logits, tokens, 100)
    assert ids.shape == values.shape == (len(logits), 91)
    wanted = logits.double().log_softmax(-1)
    assert (wanted.gather(1, ids.long()) - values).abs().max() < 1e-5
    assert ids[:, 0].tolist() == tokens.tolist()
    order = logits.argsort(-1, descending=True)
    assert (order == ids[:, 1:]).all()
    assert ((order == tokens[:, None]).int().argmax(-1) + 1).tolist() == ranks.tolist()


PROMPT_ASKED: list[dict[str, Any]] = [
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"prompt_logprobs": 4, "max_tokens": 6, "logprobs": 2},
    {"max_tokens": 8},
    {"prompt_logprobs": 20, "max_tokens": 1},
    {"prompt_logprobs": 1, "max_tokens": 5, "temperature": 0, "repetition_penalty": 1.5},
]


def assert_prompt_right(checkpoint: TinyCheckpoint, output: RequestOutput, num_top: int) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert not isinstance(output.prompt_logprobs, list)  # created on access
    assert pickle.loads(pickle.dumps(output.prompt_logprobs)) == output.prompt_logprobs
    right = checkpoint.logprobs(prompt)[:-1]
    for entries, token_id, wanted in zip(
        output.prompt_logprobs[1:], prompt[1:], right, strict=True
    ):
        assert entries is not None
        order = wanted.argsort(descending=True).tolist()
        assert list(entries) == list(dict.fromkeys([token_id, *order[:num_top]]))
        for each, entry in entries.items():
            assert abs(entry.logprob - wanted[each].item()) < 1e-4
            assert entry.rank == order.index(each) + 1


@DEVICES
@pytest.mark.parametrize("mode", list(MODES))
def test_those_of_prompts(tiny: Any, device: str, mode: str) -> None:
    """Runs beside rows without logprobs; cached prompts are recomputed for their logprobs."""
    checkpoint = tiny("qwen3")
    params = [
        SamplingParams(seed=i, ignore_eos=True, **asked) for i, asked in enumerate(PROMPT_ASKED)
    ]
    prompts = [[5], *make_prompts()[4:8]]
    prompts[3] = [*range(100)]
    with LLM(checkpoint.path, device=device, **OPTIONS, **MODES[mode]) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, param in zip(outputs, params, strict=True):
                assert len(output.token_ids) == param.max_tokens
                assert output.finish_reason == "length"
                assert_right(checkpoint, output, param.logprobs)
                if param.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    assert output.num_cached_tokens == 0
                    assert_prompt_right(checkpoint, output, param.prompt_logprobs)
        hit = llm.generate([prompts[3]], SamplingParams(max_tokens=1), use_tqdm=False)[0]
        # The scored request filled the cache.
        assert hit.num_cached_tokens == 96 or mode == "preempted"


def test_long_prompts_are_scored_piece_by_piece(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("nanovllm.worker.prompt_logprobs.POSITIONS_AT_A_TIME", 7)
    params = SamplingParams(prompt_logprobs=3, max_tokens=0)
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        outputs = llm.generate([[*range(90)], [*range(40)]], params, use_tqdm=False)
    for output in outputs:
        assert_prompt_right(tiny("qwen3"), output, 3)


def test_a_prompt_that_streams_no_token(tiny: Any) -> None:
    params = SamplingParams(prompt_logprobs=1, max_tokens=0)
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        pieces = list(llm.stream([[1, 2, 3]], params))
    assert [piece.token_ids for piece in pieces] == [[]]
    assert pieces[0].output is not None
    assert_prompt_right(tiny("qwen3"), pieces[0].output, 1)


def test_a_stop_token_behind_a_prompt_that_is_only_scored(tiny: Any) -> None:
    """With max_tokens=0 a sampled stop token is ignored, and other rows are unaffected."""
    every = list(range(160))
    scored = SamplingParams(prompt_logprobs=1, max_tokens=0, stop_token_ids=every)
    other = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        outputs = llm.generate([[1, 2, 3], [4, 5]], [scored, other], use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert [len(output.token_ids) for output in outputs] == [0, 4]
    assert outputs[0].time_to_first_token == 0.0
    assert_prompt_right(tiny("qwen3"), outputs[0], 1)


def test_scores(tiny: Any) -> None:
    checkpoint, prompt = tiny("qwen3"), [3, 1, 4, 1, 5]
    best = checkpoint.generate(prompt, 3)
    with LLM(checkpoint.path, device="cpu", **OPTIONS) as llm:
        greedy, other, one = llm.score(prompt, [best, [9, 2, 6, 5], [best[0]]])
        with pytest.raises(RequestError, match="at least one token"):
            llm.score(prompt, [[]])
        with pytest.raises(RequestError, match="continuations must be a list"):
            llm.score(prompt, "text")
    assert greedy.is_greedy
    assert one.is_greedy
    assert not other.is_greedy
    for score in (greedy, other, one):
        right = checkpoint.logprobs([*prompt, *score.token_ids])[4:-1]
        wanted = right.gather(1, torch.tensor(score.token_ids)[:, None])[:, 0].tolist()
        assert score.token_logprobs == pytest.approx(wanted, abs=1e-4)
        assert score.logprob == pytest.approx(sum(wanted), abs=1e-3)


def test_scores_take_every_form_of_a_prompt(tiny: Any) -> None:
    """Covers the README's examples; a salt in a dict isolates the cache of a scored prompt."""
    ids, continuations = list(range(40)), [[9, 2], [6]]
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        want = llm.score(ids, continuations)
        for prompt in (tuple(ids), np.array(ids), {"prompt_token_ids": ids, "cache_salt": "a"}):
            for others in ([tuple(each) for each in continuations], map(np.array, continuations)):
                assert llm.score(prompt, others) == want
        for salt, is_cached in (("a", True), ("b", False)):
            [output] = llm.generate([ids], SamplingParams(max_tokens=1), cache_salt=salt)
            assert bool(output.num_cached_tokens) == is_cached
        with pytest.raises(RequestError, match="a string or token ids"):
            llm.score(ids, [{"prompt_token_ids": [9, 2], "cache_salt": "a"}])
