"""Bias, allowed ids, bad words and penalties in the engine, against a simple reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.added_requests import AddedRequests
from nanovllm.errors import RequestError
from nanovllm.llm import create_engine
from tests.checkpoints import MIN_GAP, VOCAB_SIZE, TinyCheckpoint
from tests.devices import DEVICES
from tests.number_tokenizer import read_numbers
from tests.ops.test_torch_sampling import chi_square, chi_square_limit
from tests.test_equals_transformers import make_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.2,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}
MAX_TOKENS = 14
EDITS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {3: 5.0, 17: -100.0, 40: 2.5}},
    {"allowed_token_ids": [*range(5, 60, 5)]},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.4},
    {},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0},
    {"min_tokens": 5, "stop_token_ids": [*range(0, VOCAB_SIZE, 2)]},
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {9: 4.0, 11: 4.0},
        "allowed_token_ids": [*range(0, VOCAB_SIZE, 3), 11],
        "min_tokens": 3,
        "stop_token_ids": [9, 12, 15],
    },
]
BAD_WORDS = ((4,), (8, 9), (7, 7, 7))


def edited(
    logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams, words: Any
) -> np.ndarray:
    """Edit logits one token at a time, as the documentation specifies."""
    logits = logits.astype(np.float64)
    allowed = params.allowed_token_ids
    for token_id in range(len(logits)):
        if allowed is not None and token_id not in allowed:
            logits[token_id] = -np.inf
    for *before, last in words:
        if not before or answer[-len(before) :] == before:
            logits[last] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    if len(answer) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    counts = Counter(answer)
    for token_id in {*prompt, *answer}:
        rate = params.repetition_penalty
        logits[token_id] *= 1 / rate if logits[token_id] > 0 else rate
        logits[token_id] -= params.frequency_penalty * counts[token_id]
        logits[token_id] -= params.presence_penalty * (counts[token_id] > 0)
    return logits


def reference(
    checkpoint: TinyCheckpoint, prompt: list[int], params: SamplingParams, words: Any = ()
) -> list[int]:
    """Return greedy tokens; assert that each leads the runner-up by a clear gap after the edits."""
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        with torch.inference_mode():
            logits = checkpoint.model(torch.tensor([prompt + answer])).logits[0, -1]
        values = edited(logits.numpy(), prompt, answer, params, words)
        second, best = np.sort(values)[-2:]
        assert best - second > MIN_GAP, "choose another prompt"
        answer.append(int(values.argmax()))
        if answer[-1] in params.stop_token_ids:
            break
    return answer


def greedy(edits: dict[str, Any], max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **edits)


def generate(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "ahead": {"depth": 1},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"num_kvcache_blocks": 12, "depth": 1},
}


@pytest.fixture(scope="module")
def wanted(tiny: Any) -> list[list[int]]:
    pairs = zip(make_prompts(), EDITS, strict=False)
    return [reference(tiny("qwen3"), prompt, greedy(edits)) for prompt, edits in pairs]


@DEVICES
@pytest.mark.parametrize("mode", list(MODES))
def test_every_edit_beside_every_other(
    tiny: Any, wanted: list[list[int]], device: str, mode: str
) -> None:
    """Runs twice, the second time from the prefix cache; rows without edits equal transformers."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()[: len(EDITS)]
    params = [greedy(edits) for edits in EDITS]
    with LLM(checkpoint.path, device=device, **OPTIONS, **MODES[mode]) as llm:
        for _ in range(2):
            assert generate(llm, prompts, params) == wanted
        if mode == "preempted":
            assert llm.engine.core.scheduler.num_preemptions > 0
    assert wanted[0] == checkpoint.generate(prompts[0], MAX_TOKENS)


@DEVICES
def test_rows_are_edited_a_few_at_a_time(
    tiny: Any, wanted: list[list[int]], device: str, monkeypatch: Any
) -> None:
    """Long sequences are split like this; `tests/worker/test_logits_edits.py` tests how."""
    monkeypatch.setattr("nanovllm.worker.logits_edits.MAX_TOKENS", 60)
    params = [greedy(edits) for edits in EDITS]
    with LLM(tiny("qwen3").path, device=device, **OPTIONS) as llm:
        assert generate(llm, make_prompts()[: len(EDITS)], params) == wanted


@DEVICES
@pytest.mark.parametrize("depth", [0, 1])
def test_bad_words_of_several_tokens(tiny: Any, device: str, depth: int) -> None:
    """A bad word's first tokens must be in the output, not in the prompt. The words come from
    unedited completions, so that the model would generate each of them."""
    checkpoint, prompts = tiny("qwen3"), make_prompts()[:6]
    free = [reference(checkpoint, prompt, greedy({})) for prompt in prompts]
    words = [(*BAD_WORDS, tuple(a[2:4]), tuple(a[5:8]), (a[0],), (p[-1], a[0])) for p, a in
             zip(prompts, free, strict=True)]  # fmt: skip
    want = [
        reference(checkpoint, prompt, greedy({}), bad)
        for prompt, bad in zip(prompts, words, strict=True)
    ]
    assert all(a != b for a, b in zip(free, want, strict=True))
    config = EngineConfig(str(checkpoint.path), device=device, depth=depth, **OPTIONS)
    engine = create_engine(config)
    added = AddedRequests(engine)
    for prompt, bad in zip(prompts, words, strict=True):
        live = engine.prepare(prompt, greedy({}))
        live.completions[0].request = replace(live.completions[0].request, bad_words=bad)
        added.submit(live)
    answers = {}
    while not added.is_finished():
        answers |= {output.seq_id: output.token_ids for output in added.step().finished}
    engine.close()
    assert [answers[seq_id] for seq_id in sorted(answers)] == want


def halve(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Halve all logits, and raise that of the last token a little."""
    logits = logits / 2
    logits[output_token_ids[-1:]] += 1
    return logits


DRAWN: list[dict[str, Any]] = [
    {"temperature": 4.0},
    {"temperature": 2.8, "logit_bias": {5: 1.0, 20: -2.0}},
    {"temperature": 5.2, "presence_penalty": 1.2},
    {"temperature": 4.0, "frequency_penalty": -0.8},
    {"temperature": 3.6, "repetition_penalty": 1.7},
    {"temperature": 4.4, "repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 5},
    {"temperature": 8.0, "frequency_penalty": 0.6, "top_p": 0.95, "logit_bias": {10: 0.5}},
    {"temperature": 9.0, "presence_penalty": -0.4, "min_p": 0.02},
    {"temperature": 14.0, "top_k": 6},
    {"temperature": 14.0, "top_p": 0.8},
    {"temperature": 14.0, "min_p": 0.1},
    {"temperature": 9.0, "min_tokens": 2, "stop_token_ids": [10, 20]},
    {"temperature": 14.0, "bad_words": ["5", "14 25", "35 25", "45 25"]},
    {"temperature": 5.0, "logits_processors": [halve]},
]


@pytest.mark.slow
@DEVICES
def test_draws_follow_the_edited_probabilities(tiny: Any, device: str) -> None:
    """Checks second tokens that follow the most frequent first one; all kinds run in one batch."""
    checkpoint, prompt, num_draws = tiny("qwen3"), [3, 14, 15, 14, 65], 600
    allowed = {"allowed_token_ids": [*range(5, 50, 5), 14]}
    params = [
        SamplingParams(max_tokens=2, ignore_eos=True, seed=seed, **allowed, **kind)
        for seed in range(num_draws)
        for kind in DRAWN
    ]
    options = {**OPTIONS, "max_num_seqs": 256}
    with LLM(checkpoint.path, device=device, **options) as llm:
        read_numbers(llm)
        answers = generate(llm, [prompt] * len(params), params)
    for kind, param in enumerate(params[: len(DRAWN)]):
        drawn = answers[kind :: len(DRAWN)]
        first = Counter(a for a, _ in drawn).most_common(1)[0][0]
        with torch.inference_mode():
            logits = checkpoint.model(torch.tensor([[*prompt, first]])).logits[0, -1]
        words = [list(map(int, word.split())) for word in param.bad_words]
        values = edited(logits.numpy(), prompt, [first], param, words)
        for function in param.logits_processors:
            values = function([first], torch.from_numpy(values)).numpy()
        probs = kept_probs(values, param)
        counts = np.bincount([b for a, b in drawn if a == first], minlength=VOCAB_SIZE)
        assert counts.sum() > 60
        assert counts[probs == 0].sum() == 0
        statistic, degrees = chi_square(counts, probs)
        assert degrees >= 2, DRAWN[kind]
        assert statistic < chi_square_limit(degrees), DRAWN[kind]


def kept_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights)
    kept = order[: params.top_k or len(order)]
    if params.top_p < 1:
        before = np.cumsum(weights[kept]) - weights[kept]
        kept = kept[before < params.top_p * weights[kept].sum()]
    kept = [i for i in kept if weights[i] >= params.min_p]
    probs = np.zeros_like(weights)
    probs[kept] = weights[kept]
    return probs / probs.sum()


def test_nothing_allowed_is_an_error_that_says_so(tiny: Any) -> None:
    params = greedy({"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 2})
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "allowed_token_ids" in output.error


def test_truncated_prompts_keep_their_end(tiny: Any) -> None:
    prompt = [*range(60), 3]
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        [output] = llm.generate([prompt], greedy({"truncate_prompt_tokens": 7}), use_tqdm=False)
        assert output.prompt_token_ids == prompt[-7:]
        assert generate(llm, [prompt[-7:]], greedy({})) == [output.token_ids]
        assert generate(llm, [prompt[-7:]], greedy({"truncate_prompt_tokens": 70})) == [
            output.token_ids
        ]


def test_ids_outside_the_vocabulary_are_named(tiny: Any) -> None:
    with LLM(tiny("qwen3").path, device="cpu", **OPTIONS) as llm:
        for options in ({"logit_bias": {VOCAB_SIZE: 1}}, {"allowed_token_ids": [VOCAB_SIZE]}):
            with pytest.raises(
                RequestError, match=f"{next(iter(options))} must be ids .* got {VOCAB_SIZE}"
            ):
                llm.generate([[1]], SamplingParams(**options), use_tqdm=False)
        with pytest.raises(RequestError, match="bad_words must be empty"):
            llm.generate([[1]], SamplingParams(bad_words=["a"]), use_tqdm=False)
