"""Log-probabilities of sampled tokens equal those of transformers, whatever a batch asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_sampling import ROWS_AT_A_TIME, token_logprobs
from tests.checkpoints import TinyCheckpoint
from tests.devices import DEVICES
from tests.test_edited_requests import MODES, OPTIONS
from tests.test_equals_transformers import make_prompts
from tests.threaded_ranks import engines_of

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


def assert_right(checkpoint: TinyCheckpoint, output: RequestOutput, num_best: int | None) -> None:
    if num_best is None:
        assert output.logprobs is output.cumulative_logprob is None
        return
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    prompt, answer = output.prompt_token_ids, output.token_ids
    with torch.inference_mode():
        logits = checkpoint.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    right = logits.double().log_softmax(-1)
    total = 0.0
    for entries, token_id, wanted in zip(output.logprobs, answer, right, strict=True):
        order = wanted.argsort(descending=True).tolist()
        assert list(entries) == list(dict.fromkeys([token_id, *order[:num_best]]))
        for each, entry in entries.items():
            assert abs(entry.logprob - wanted[each].item()) < 1e-4
            assert entry.rank == order.index(each) + 1
            assert entry.decoded_token is None
        total += entries[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(total)


@DEVICES
@pytest.mark.parametrize("mode", list(MODES))
def test_they_are_the_models_own(tiny: Any, device: str, mode: str) -> None:
    """Twice, the second time from the prefix cache."""
    checkpoint, params = tiny("qwen3"), make_params()
    prompts = make_prompts()[: len(params)]
    with LLM(checkpoint.path, device=device, **OPTIONS, **MODES[mode]) as llm:
        for _ in range(2):
            for output, param in zip(
                llm.generate(prompts, params, use_tqdm=False), params, strict=True
            ):
                assert_right(checkpoint, output, param.logprobs)


def test_two_ranks(tiny: Any) -> None:
    checkpoint, params = tiny("qwen3"), make_params()
    prompts = make_prompts()[: len(params)]
    with engines_of(2), LLM(checkpoint.path, device="cpu", **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, param in zip(outputs, params, strict=True):
        assert_right(checkpoint, output, param.logprobs)


def test_asking_for_them_changes_no_token(tiny: Any) -> None:
    prompts = make_prompts()[:6]
    answers = []
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        for logprobs in (None, 4):
            params = [
                SamplingParams(max_tokens=9, seed=i, ignore_eos=True, logprobs=logprobs)
                for i in range(6)
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


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
    logits = torch.randn(2 * ROWS_AT_A_TIME + 3, 90, dtype=torch.float64).float()
    tokens = torch.randint(90, (len(logits),))
    ids, values, ranks = token_logprobs(logits, tokens, 100)
    assert ids.shape == values.shape == (len(logits), 91)
    wanted = logits.double().log_softmax(-1)
    assert (wanted.gather(1, ids.long()) - values).abs().max() < 1e-5
    assert ids[:, 0].tolist() == tokens.tolist()
    order = logits.argsort(-1, descending=True)
    assert (order == ids[:, 1:]).all()
    assert ((order == tokens[:, None]).int().argmax(-1) + 1).tolist() == ranks.tolist()


@pytest.mark.parametrize("logprobs", [-1, 101, 2.5, True, "3"])
def test_numbers_that_make_no_sense_are_named(logprobs: Any) -> None:
    with pytest.raises(ConfigError, match="logprobs must be"):
        SamplingParams(logprobs=logprobs)
