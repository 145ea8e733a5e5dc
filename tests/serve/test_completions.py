"""/v1/completions: whole responses equal streams, and match transformers."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from nanovllm import AsyncLLM
from tests.checkpoints import VOCAB_SIZE
from tests.serve.running import Running, running

CASES: list[tuple[Any, dict[str, Any]]] = [
    ("One text", {}),
    (["Two", "texts"], {"n": 3, "temperature": 0.8}),
    ([5, 6, 7], {"logprobs": 2}),
    ([[1, 2, 3], [4, 5]], {"echo": True}),
    (["Two", "texts"], {"echo": True, "logprobs": 1, "n": 2}),
    ([[1, 2, 3], [4, 5]], {"stop": ["e", "\n"], "max_tokens": 40, "temperature": 1.0}),
]


def gather(stream: Any) -> tuple[dict[int, Any], Any]:
    """Return the text, logprobs and finish reason of each choice of a stream, and its usage."""
    choices: dict[int, Any] = defaultdict(lambda: ["", [], [], None, None])
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            found = choices[choice.index]
            found[0] += choice.text
            if choice.logprobs is not None:
                found[1] += choice.logprobs.tokens
                found[2] += choice.logprobs.token_logprobs
            if choice.finish_reason is not None:
                found[3:] = choice.finish_reason, choice.stop_reason
    return choices, usage


@pytest.mark.parametrize(("prompt", "options"), CASES, ids=str)
def test_a_stream_says_what_a_whole_answer_says(
    server: Running, prompt: Any, options: dict[str, Any]
) -> None:
    request = {"model": "tiny", "prompt": prompt, "seed": 3, "temperature": 0, **options}
    whole = server.openai.completions.create(**request)
    usage = {"include_usage": True}
    stream = server.openai.completions.create(**request, stream=True, stream_options=usage)
    choices, streamed_usage = gather(stream)
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in whole.choices] == list(
        range(num_prompts * options.get("n", 1))
    )
    assert {**choices} == {
        choice.index: [
            choice.text,
            choice.logprobs.tokens if choice.logprobs else [],
            choice.logprobs.token_logprobs if choice.logprobs else [],
            choice.finish_reason,
            choice.stop_reason,
        ]
        for choice in whole.choices
    }
    assert streamed_usage.completion_tokens == whole.usage.completion_tokens
    assert streamed_usage.prompt_tokens == whole.usage.prompt_tokens


def test_sixteen_tokens_unless_told(server: Running) -> None:
    answer = server.openai.completions.create(
        model="tiny", prompt=[1, 2], temperature=0, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    assert len(choice.token_ids) == 16
    assert choice.prompt_token_ids == [1, 2]
    assert choice.finish_reason == "length"
    assert answer.usage.total_tokens == 18


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt_as_harnesses_ask_for_it(server: Running, max_tokens: int) -> None:
    """All prompt tokens but the first have a logprob, next to that of the most likely token."""
    answer = server.openai.completions.create(
        model="tiny",
        prompt=[[10, 20, 30], [40, 50]],
        echo=True,
        logprobs=1,
        max_tokens=max_tokens,
        temperature=0,
    )
    for choice, num_prompt in zip(answer.choices, (3, 2), strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == num_prompt + max_tokens
        assert logprobs.token_logprobs[0] is None
        for own, best in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert own <= max(best.values()) <= 0
            assert own in best.values()
    assert answer.usage.completion_tokens == 2 * max_tokens


@pytest.fixture(scope="module")
def spaced(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with a SentencePiece-like tokenizer, which drops the first space of a text."""
    folder = tmp_path_factory.mktemp("spaced") / "model"
    shutil.copytree(tiny("qwen3").path, folder)
    pieces = ["<unk>", *(f"{'▁' * (i % 3 > 0)}{i}" for i in range(1, VOCAB_SIZE))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    sizes = {"max_model_len": 64, "num_kvcache_blocks": 8}
    llm = AsyncLLM(folder, in_process=True, device="cpu", dtype="float32", **sizes)
    try:
        with running(llm) as server:
            yield server
    finally:
        llm.close()


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_spaces_of_sentencepiece_are_kept_between_tokens(spaced: Running, max_tokens: int) -> None:
    prompts = [[10, 11, 12, 13], [20, 30], [1, 2]]
    answer = spaced.openai.completions.create(
        model="tiny", prompt=prompts, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        ids, logprobs = [*prompt, *choice.token_ids], choice.logprobs
        words = "".join(f"{' ' * (i % 3 > 0)}{i}" for i in ids)
        assert choice.text == words.removeprefix(" ")
        assert "".join(logprobs.tokens) == choice.text
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
            assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_and_not_the_tokens_of_one(server: Running, stream: bool) -> None:
    prompt = "a日b🙂"
    options = {"model": "tiny", "prompt": prompt, "logprobs": 0, "echo": True, "max_tokens": 0}
    answer = server.openai.completions.create(**options, stream=stream)
    (choice,) = (chunk.choices[0] for chunk in answer) if stream else answer.choices
    assert choice.text == prompt
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 2, 3, 3, 3, 3]


def test_logprobs_are_the_models_own(server: Running) -> None:
    """The logprobs of prompt tokens equal those of the same tokens when generated."""
    first = server.openai.completions.create(
        model="tiny", prompt=[1, 2, 3], temperature=0, logprobs=3, max_tokens=8,
        extra_body={"return_token_ids": True},
    ).choices[0]  # fmt: skip
    again = server.openai.completions.create(
        model="tiny", prompt=[1, 2, 3, *first.token_ids], echo=True, logprobs=3, max_tokens=0
    ).choices[0]
    generated = first.logprobs.token_logprobs
    assert again.logprobs.token_logprobs[3:] == pytest.approx(generated, abs=1e-4)


def test_too_long_prompts_are_refused_by_code(server: Running) -> None:
    for asked in ({"prompt": [1] * 1025}, {"prompt": [1] * 1012, "max_tokens": 13}):
        with pytest.raises(BadRequestError) as caught:
            server.openai.completions.create(model="tiny", **asked)
        assert caught.value.code == "context_length_exceeded"
    answer = server.openai.completions.create(model="tiny", prompt=[1] * 1012)
    assert answer.usage.completion_tokens <= 12


def test_a_prompt_is_cut_when_that_is_asked_for(server: Running) -> None:
    answer = server.openai.completions.create(
        model="tiny", prompt=[*range(200)], extra_body={"truncate_prompt_tokens": 7}
    )
    assert answer.usage.prompt_tokens == 7


def test_unknown_models_are_not_found(server: Running) -> None:
    with pytest.raises(NotFoundError) as caught:
        server.openai.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    assert server.openai.completions.create(model="org/tiny", prompt="x").model == "tiny"


def test_cached_tokens_are_counted(server: Running) -> None:
    request = {"model": "tiny", "prompt": [9] * 100, "max_tokens": 1}
    salt = {"extra_body": {"cache_salt": "ours"}}
    cached = [
        server.openai.completions.create(**request, **salt).usage.prompt_tokens_details
        for _ in range(2)
    ]
    assert [details.cached_tokens for details in cached] == [0, 96]
