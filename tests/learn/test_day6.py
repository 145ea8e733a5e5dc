"""Day 6: sampled tokens follow the right distribution, and streams give the right text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import day6 as solutions
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import day6_sampling as day6
from common import Model
from day6_sampling import Detokenizer, Request, SamplingParams, StopStrings
from nanovllm.ops import torch_sampling
from tests.checkpoints import TinyCheckpoint
from tests.learn.test_day5 import PROMPTS

MAX_TOKENS = 9
EVERY_PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.6),
]


def requests(params: list[SamplingParams]) -> list[Request]:
    prompts = enumerate(PROMPTS[: len(params)])
    return [Request(str(i), list(ids), MAX_TOKENS, params=params[i]) for i, ids in prompts]


def test_greedy_equals_transformers(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    sequences = requests([SamplingParams(temperature=0)] * len(PROMPTS))
    day6.new_engine(tiny_llama, num_blocks=11).run(sequences)
    assert [seq.output_ids for seq in sequences] == tiny("llama").answers(PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("params", EVERY_PARAMS)
def test_probabilities_equal_transformers(params: SamplingParams) -> None:
    logits = 3 * torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    probs = torch.stack([day6.sampling_probs(row, params) for row in logits])
    torch.testing.assert_close(probs, scores.softmax(-1))


def test_sampled_tokens_do_not_depend_on_other_requests(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    params = [
        SamplingParams(each.temperature, each.top_k, each.top_p, seed=seed)
        for seed, each in enumerate(EVERY_PARAMS)
    ]
    alone = requests(params)
    for request in alone:
        day6.new_engine(tiny_llama, num_blocks=64).run([request])
    for num_blocks in (64, 11):
        together = requests(params)
        engine = day6.new_engine(tiny_llama, num_blocks)
        engine.run(together)
        assert [seq.token_ids for seq in together] == [seq.token_ids for seq in alone]
    assert any(event.endswith("preempted") for event in engine.scheduler.events)
    # The same numbers applied to the scores of transformers choose the same tokens.
    for seq in alone:
        scores = tiny("llama").logprobs(seq.token_ids)
        for position in range(seq.num_prompt_tokens, len(seq.token_ids)):
            right = day6.sample(scores[position - 1].float(), seq.params, position)
            assert seq.token_ids[position] == right


def test_numbers_equal_the_engine() -> None:
    for seed, position in ((0, 0), (7, 123), (2**62, 5)):
        number = torch_sampling.uniform(torch.tensor(seed), torch.tensor(position))
        assert day6.uniform(seed, position) == float(number)


def test_frequencies() -> None:
    logits, params = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5]), SamplingParams(top_k=4, seed=3)
    drawn = torch.tensor([day6.sample(logits, params, position) for position in range(4000)])
    frequencies = drawn.bincount(minlength=5) / len(drawn)
    probs = day6.sampling_probs(logits, params)
    assert frequencies[3] == probs[3] == 0
    torch.testing.assert_close(frequencies, probs, atol=0.02, rtol=0)


class SpacingTokenizer:
    """Like Llama 2's: the first token of a text loses its space."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f" w{token_id}" for token_id in token_ids)[1:]


def test_detokenizer(smollm2: tuple[Model, Any]) -> None:
    _, tokenizer = smollm2
    texts = ["Grüße 東京 🎉👍🏽!", "naïve", "日本語", " a  b\n\n", day6.TEXT]
    for text in texts:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + detokenizer.finish() == text
    detokenizer = Detokenizer(tokenizer)
    half = tokenizer.encode("a 🎉")[:-1]
    assert "".join(map(detokenizer.push, half)) == "a"
    assert detokenizer.finish() == tokenizer.decode(half)[1:]
    spacing = Detokenizer(SpacingTokenizer())
    assert [spacing.push(i) for i in (1, 2, 3)] == ["w1", " w2", " w3"]


def starts_one(stop: tuple[str, ...], text: str) -> bool:
    return any(each.startswith(text) for each in stop)


def test_stop_strings() -> None:
    """Compare with a search in the whole text, however it is divided."""
    rng = random.Random(0)
    num_found = 0
    for _ in range(500):
        text = "".join(rng.choices("ab", k=12))
        stop = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2))
        stops, shown, pushed = StopStrings(stop), "", 0
        while pushed < len(text) and not stops.is_found:
            size = rng.randint(1, 3)
            shown += stops.push(text[pushed : pushed + size])
            pushed += size
            if not stops.is_found:
                assert shown + stops.held == text[:pushed]
                ends = [text[i:pushed] for i in range(pushed)]
                assert stops.held == next((end for end in ends if starts_one(stop, end)), "")
        text = text[:pushed]
        start = min((text.find(each) for each in stop if each in text), default=len(text))
        assert shown + stops.held == text[:start]
        assert stops.is_found == (start < len(text))
        num_found += stops.is_found
    assert 100 < num_found < 500


def test_only_what_may_be_a_stop_string_is_held() -> None:
    stops = StopStrings(("Mars, Saturn", "Mau"))
    pieces = [stops.push(piece) for piece in (" Ma", "rs", ",", " Ju", "M", "au")]
    assert pieces == [" ", "", "", "Mars, Ju", "", ""]
    assert stops.is_found


def test_the_program(
    smollm2: tuple[Model, Any], assert_greedy: Callable[..., None], run_program: Callable[..., str]
) -> None:
    _, tokenizer = smollm2
    printed = run_program(day6, MAX_TOKENS=7)
    text = "' young woman \u2013 a woman with a'"
    for line in (
        "  ' young'      15.3%          44.3%  1.2%   43.8%    37.4%",
        f"     1  alone                    0  {text}",
        f"     1  with two others          0  {text}",
        f"     1  in a small pool          1  {text}",
        "       126  '\ufffd'        ' 東'",
        "  ' Jupiter'  'Mars, Jupiter'",
        "The text: ' Earth, Mars, Jupiter, Saturn, '. The request ended after 11 of 14 tokens.",
    ):
        assert f"\n{line}" in printed
    output_ids = tokenizer.encode(" Earth, Mars, Jupiter, Saturn, Uranus, Neptune")
    assert_greedy(tokenizer.encode(day6.LIST_PROMPT), output_ids)


def test_a_stop_string_frees_the_blocks(
    tiny: Callable[[str], TinyCheckpoint], tiny_llama: Model
) -> None:
    """The stop string spans two tokens; a request without one runs on beside it."""
    right = tiny("llama").generate(PROMPTS[0], MAX_TOKENS)
    texts = [f"w{token_id}" for token_id in right]
    stop = " ".join(texts[2:4])[1:-1]
    params = [SamplingParams(0, stop=(stop,)), SamplingParams(0)]
    stopped, other = sequences = [
        Request(name, list(PROMPTS[0]), MAX_TOKENS, params=each)
        for name, each in zip("AB", params, strict=True)
    ]
    engine = day6.new_engine(tiny_llama, num_blocks=64)
    shown = {"A": "", "B": ""}
    for row, piece in day6.stream(engine, sequences, SpacingTokenizer()):
        shown[row.seq.name] += piece
    assert stopped.output_ids == right[:4]
    assert other.output_ids == right
    assert shown == {"A": f"{texts[0]} {texts[1]} w", "B": " ".join(texts)}
    assert len(engine.scheduler.blocks.free_ids) == 64


def test_exercise_1_gumbel() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.5, seed=11)
    drawn = [solutions.sample_gumbel(logits, params, position) for position in range(4000)]
    frequencies = torch.tensor(drawn).bincount(minlength=40) / len(drawn)
    torch.testing.assert_close(frequencies, day6.sampling_probs(logits, params), atol=0.02, rtol=0)
    others = [solutions.uniform_per_token(seed, 5, torch.arange(40)) for seed in (11, 12, 2**62)]
    assert all(((each > 0) & (each < 1)).all() for each in others)
    assert len({tuple(each.tolist()) for each in others}) == 3


def test_exercise_2_choices(smollm2: tuple[Model, Any]) -> None:
    model, tokenizer = smollm2
    reviews = {"What a wonderful film!": " positive", "The worst film ever.": " negative"}
    for review, choice in reviews.items():
        prompt = f"Review: {review}\nThe review is"
        choices = [" positive", " negative"]
        assert solutions.choose(model, tokenizer, prompt, choices, SamplingParams(0)) == choice
    texts = ["a", "ab", "b", "", "c"]
    assert solutions.allowed_ids(texts, ["abc", "b"], "") == [0, 1, 2]
    assert solutions.allowed_ids(texts, ["abc", "b"], "ab") == [4]
