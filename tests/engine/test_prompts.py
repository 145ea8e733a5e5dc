"""All accepted and rejected formats of prompts, messages and parameters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.conversations import as_conversations
from nanovllm.engine.prompts import Prompt, as_prompt, split_prompts
from nanovllm.errors import ConfigError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from tests.checkpoints import TinyCheckpoint

IDS = [3, 1, 2]


def parse(prompts: Any, cache_salt: str | None = None) -> list[Prompt]:
    return [as_prompt(item, cache_salt) for item in split_prompts(prompts)]


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        (3, 1, 2),
        np.array(IDS),
        torch.tensor(IDS),
        array("i", IDS),
        [np.int64(3), 1, np.int32(2)],
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": (3, 1, 2)},
        {"prompt_token_ids": np.array(IDS), "cache_salt": None},
        [IDS],
        ((3, 1, 2),),
        [np.array(IDS)],
        np.array([IDS]),
        [{"prompt_token_ids": IDS}],
        ({"prompt_token_ids": IDS, "prompt": None},),
    ],
    ids=repr,
)
def test_one_prompt_of_ids(prompts: Any) -> None:
    assert parse(prompts) == [Prompt(IDS)]


@pytest.mark.parametrize(
    "prompts",
    ["a b", {"prompt": "a b"}, ["a b"], ("a b",), [{"prompt": "a b"}], np.array(["a b"])],
    ids=repr,
)
def test_one_text(prompts: Any) -> None:
    assert parse(prompts) == [Prompt("a b")]


def test_several_of_any_form() -> None:
    mixed = ["a", IDS, {"prompt": "b"}, (1, 2), {"prompt_token_ids": [5]}, np.array([7])]
    want = [Prompt("a"), Prompt(IDS), Prompt("b"), Prompt([1, 2]), Prompt([5]), Prompt([7])]
    assert parse(mixed) == parse(tuple(mixed)) == want
    assert parse(np.array([[1, 2], [3, 4]])) == [Prompt([1, 2]), Prompt([3, 4])]
    assert parse([]) == parse(()) == parse(np.array([])) == []


def test_a_prompts_own_salt_comes_first() -> None:
    prompts = ["a", {"prompt": "b", "cache_salt": "own"}, {"prompt": "c"}]
    assert [prompt.cache_salt for prompt in parse(prompts, "call's")] == ["call's", "own", "call's"]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        b"text",
        {1, 2},
        {},
        {"text": "a"},
        {"prompt": None},
        {"prompt": "a", "prompt_token_ids": IDS},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt": IDS},
        {"prompt_token_ids": "a"},
        {"prompt_token_ids": 5},
        np.array(5),
    ],
    ids=repr,
)
def test_other_things_are_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestError, match='"prompt'):
        as_prompt(prompt)


def test_images_beside_a_prompt_are_refused() -> None:
    with pytest.raises(RequestError, match="multi_modal_data: this model reads text only"):
        as_prompt({"prompt": "a", "multi_modal_data": {"image": b""}})


@pytest.mark.parametrize(
    "prompts",
    [None, 7, b"text", {1, 2}, iter(["a"]), np.array(5)],
    ids=lambda prompts: type(prompts).__name__,
)
def test_other_things_are_no_prompts(prompts: Any) -> None:
    with pytest.raises(RequestError, match="or a list of such prompts"):
        split_prompts(prompts)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


PART = {"type": "text", "text": "one"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one"),
        ([PART], "one"),
        ([PART, {"type": "text", "text": "two"}], "one\ntwo"),
        ((PART, "two"), "one\ntwo"),
        ([{"text": "two"}], "two"),
        ([], ""),
        ("", ""),
    ],
)
def test_content_becomes_a_text(content: Any, text: str) -> None:
    message = user(content, name="Ada")
    assert as_conversations([message]) == [[{"role": "user", "content": text, "name": "Ada"}]]
    assert message["content"] is content


def test_a_message_that_calls_tools_needs_no_content() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for message in (
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
    ):
        [[got]] = as_conversations([message])
        assert got == {**message, "content": ""}


AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("hi", "messages must be a list of at least one message"),
        ({"role": "user", "content": "x"}, "messages must be a list of at least one message"),
        ([], "at least one message"),
        ([[]], "at least one message"),
        ([user("x"), "hi"], r"^messages\[1\] must be a dict"),
        ([["hi"]], r"^messages\[0\]\[0\] must be a dict"),
        ([{"content": "x"}], "a dict with a role"),
        ([{"role": 5, "content": "x"}], "a dict with a role"),
        ([{"role": "user"}], "content must be a string or"),
        ([user(None)], "content must be a string or"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content must be a string or"),
        ([user(5)], "content must be a string or .* got 5"),
        ([user({"text": "x"})], "content must be a string or"),
        ([user(b"x")], "content must be a string or"),
        (
            [user([PART, IMAGE])],
            r"^messages\[0\].content has .*'image_url', but this model reads text only",
        ),
        ([[user("x")], [user([AUDIO])]], r"^messages\[1\]\[0\].content has .*'input_audio', but"),
        ([user([{"type": "refusal"}])], r"^messages\[0\].content must be .*text parts.*refusal"),
        ([user([5])], "a list of text parts"),
        ([user([{"type": "text"}])], "a list of text parts"),
        ([[user("x")], [user("x"), user(None)]], r"^messages\[1\]\[1\].content must be"),
        ([[user("x")], user("x")], r"^messages\[1\] must be a list"),
    ],
    ids=repr,
)
def test_bad_messages_are_named(messages: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        as_conversations(messages)


def test_sampling_params_take_numpy_numbers() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        top_k=np.uint8(3),  # type: ignore[arg-type]
        top_p=np.float64(0.25),
        seed=np.int32(-1),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        min_tokens=np.array(2),  # type: ignore[arg-type]
        stop_token_ids=np.array([4, 5]),
        min_p=torch.tensor(0.5),  # type: ignore[arg-type]
    )
    want = SamplingParams(
        temperature=0.5,
        max_tokens=7,
        top_k=3,
        top_p=0.25,
        seed=-1,
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=[4, 5],
        min_p=0.5,
    )
    assert given == want
    assert type(given.max_tokens) is type(given.seed) is int
    assert type(given.temperature) is float
    assert all(type(token_id) is int for token_id in given.stop_token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": np.float64(3.0)},
        {"temperature": np.array([0.5])},
        {"seed": np.bool_(True)},
        {"temperature": np.float32("nan")},
        {"stop_token_ids": np.array([1.5])},
        {"max_tokens": "3"},
    ],
    ids=repr,
)
def test_numbers_of_the_wrong_kind_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingParams(**options)


def test_an_output_is_a_mapping() -> None:
    output = RequestOutput(0, "p", [1], "t", [2], "stop", 0, 0.5, 1.0)
    assert "text" in output
    assert "log_probs" not in output
    assert (output.get("text"), output.get("log_probs", 7)) == ("t", 7)
    assert dict(output)["token_ids"] == [2]
    assert {**output} == dict(output) == dict(output.items())
    assert list(output) == list(output.keys())
    assert (len(output), next(iter(output))) == (len([*output]), "seq_id")
    assert output == RequestOutput(0, "p", [1], "t", [2], "stop", 0, 0.5, 1.0)
    with pytest.raises(KeyError, match="is not one of seq_id"):
        output["log_probs"]


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], TinyCheckpoint], one_thread: None) -> Iterator[LLM]:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(tiny("qwen3").path, kvcache_block_size=16, max_num_seqs=4, **options) as llm:
        yield llm


FEW = SamplingParams(temperature=0, max_tokens=3)


def test_every_form_gives_the_same_answer(llm: LLM) -> None:
    forms = [IDS, tuple(IDS), np.array(IDS), {"prompt_token_ids": IDS}]
    outputs = llm.generate(forms, FEW, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [IDS] * 4
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    for form in forms:
        assert llm.generate(form, FEW, use_tqdm=False)[0].token_ids == outputs[0].token_ids
        llm.add_request(form, FEW)
    finished = []
    while not llm.is_finished():
        finished += llm.step().finished
    assert [output.token_ids for output in finished] == [outputs[0].token_ids] * 4


def test_a_salt_in_a_prompt_isolates_it(llm: LLM) -> None:
    ids = list(range(40))
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a")]
    cached = [llm.generate(p, FEW, use_tqdm=False)[0].num_cached_tokens for p in prompts]
    assert cached == [0, 0, 32]


@pytest.mark.parametrize("bad", [[], [1, -1], [1] * 64, None, {"text": "x"}, "a text"], ids=repr)
def test_a_bad_prompt_of_several_is_named(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompts\[1\]: "):
        llm.generate([IDS, bad, IDS], FEW, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^(?!prompts)"):
        llm.generate([bad], FEW, use_tqdm=False)
    assert llm.is_finished()


def test_a_stream_can_go_on_without_the_prompts_it_refuses(llm: LLM) -> None:
    refused: dict[int, str] = {}
    prompts = [[], IDS, None, IDS, [1] * 64]
    pieces = llm.stream(prompts, FEW, on_refusal=lambda i, error: refused.update({i: str(error)}))
    answered = [piece.index for piece in pieces if piece.output is not None]
    assert answered == [1, 3]
    assert list(refused) == [0, 2, 4]
    assert refused[0].startswith("prompt must be at least one token")
    assert llm.is_finished()
