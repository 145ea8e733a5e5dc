"""/v1/responses with OpenAI's client: items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.responses import Response

from nanovllm.errors import EngineError
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
LOGPROBS = "message.output_text.logprobs"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM()) as server:
        yield server


def ask(server: Running, **fields: Any) -> Any:
    fields = {"model": "tiny", "input": "Weather in Rome?", "tools": [TOOL], **fields}
    return server.openai.responses.create(**fields)


def contents(response: Any) -> list[Any]:
    """Return the items of a response without their ids, which differ each time."""
    items = [item.to_dict() for item in response.output]
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Sunny.", ["message"]),
        (f"<think>Hm.</think>See.{CALL}{CALL}", ["reasoning", "message", *["function_call"] * 2]),
        (CALL, ["function_call"]),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_streams_have_the_items_of_whole_answers(
    fake: Running, text: str, kinds: list[str], seed: int
) -> None:
    fake.llm.text, fake.llm.seed = text, seed
    whole = ask(fake)
    Response.model_validate(whole.to_dict())  # the client itself accepts missing fields
    assert [item.type for item in whole.output] == kinds
    assert whole.status == "completed"
    assert whole.usage.output_tokens == len(text)
    assert whole.usage.input_tokens_details.cached_tokens == 3
    events = list(ask(fake, stream=True))
    assert contents(events[-1].response) == contents(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    pieces: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
    final = {item.id: item for item in events[-1].response.output}
    assert pieces.keys() == final.keys()
    for item_id, item in final.items():
        said = item.arguments if item.type == "function_call" else item.content[0].text
        assert pieces[item_id] == said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"top_logprobs": 1}, {"include": [LOGPROBS]}], ids=str)
def test_text_has_the_logprobs_of_its_own_tokens(
    fake: Running, asked: dict[str, Any], stream: bool
) -> None:
    fake.llm.text = "<think>Hm.</think>Sunny, I think."
    answer = ask(fake, stream=stream, **asked)
    events = list(answer) if stream else []
    (part,) = (events[-1].response if stream else answer).output[-1].content
    assert "".join(each.token for each in part.logprobs) == part.text
    for each in part.logprobs:
        assert each.logprob == -0.5
        assert len(each.top_logprobs) == asked.get("top_logprobs", 0)
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    if stream:
        assert [each.token for event in pieces for each in event.logprobs] == [
            each.token for each in part.logprobs
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_text_may_begin_with_a_character_of_several_tokens(fake: Running, stream: bool) -> None:
    fake.llm.text = "<think>Hm.</think>🙂 日本"
    answer = ask(fake, stream=stream, top_logprobs=1)
    (part,) = (list(answer)[-1].response if stream else answer).output[-1].content
    assert bytes(byte for each in part.logprobs for byte in each.bytes).decode() == part.text


def test_parts_are_begun_before_they_grow(fake: Running) -> None:
    """Clients add deltas to parts that were announced before."""
    fake.llm.text = "<think>Hm.</think>See."
    known = set()
    for event in ask(fake, stream=True):
        place = (getattr(event, "item_id", ""), getattr(event, "content_index", -1))
        if event.type == "response.content_part.added":
            known.add(place)
        elif event.type.endswith("_text.delta"):
            assert place in known, event.type
    assert len(known) == 2


def test_items_come_back_into_the_prompt(fake: Running) -> None:
    fake.llm.text = f"<think>Hm.</think>See.{CALL}"
    answer = ask(fake)
    call = answer.output[-1]
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.to_dict() for item in answer.output),
        result,
    ]
    ask(fake, input=items, instructions="Be brief.")
    prompt = fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])
    parts = (
        "Be brief.<|im_end|>",
        "Weather?<|im_end|>",
        f"<think>Hm.</think>See.{CALL}<|im_end|>",
        "<|im_start|>tool\nsunny<|im_end|>",
    )
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


def test_a_cut_answer_says_so() -> None:
    with running(FakeLLM(f"{CALL[:-30]}", reason="length")) as server:
        answer = ask(server)
        assert answer.status == "incomplete"
        assert [item.status for item in answer.output] == ["incomplete"]
        server.llm.text = f"See.{CALL}And"
        assert [item.status for item in ask(server).output] == [*["completed"] * 2, "incomplete"]
        assert answer.incomplete_details.reason == "max_output_tokens"
        chat = server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}]
        )
        assert chat.choices[0].finish_reason == "length"
        messages = [{"role": "user", "content": "x"}]
        message = server.post("/v1/messages", max_tokens=9, messages=messages).json()
        assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    "wrong",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "x"},
        {"background": True},
        {"truncation": "auto"},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"role": "nobody", "content": "x"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]},
        {"text": {"format": {"type": "json_object", "schema": {"const": 1}}}},
        {"max_output_tokens": 0},
        {"extra_body": {"cache_salt": "x"}},
    ],
    ids=str,
)
def test_bad_requests_are_refused(fake: Running, wrong: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError):
            ask(fake, **wrong, stream=stream)


def test_a_prompt_that_is_too_long_is_the_input(fake: Running) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(fake, input="x" * 2000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [{"role": "nobody", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"content": "x"}],
        [{"type": "function_call", "call_id": "x", "arguments": "{}"}],
        [{"type": "function_call", "call_id": "x", "name": "f", "arguments": {}}],
    ],
    ids=str,
)
def test_errors_name_the_field_that_was_sent(fake: Running, wrong: list[Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(fake, input=wrong)
    assert caught.value.param == "input"
    assert "messages" not in caught.value.message


def test_a_stream_that_breaks_says_that_it_failed() -> None:
    with running(FakeLLM("Some text.", failure=EngineError("the core died"))) as server:
        events = list(ask(server, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the core died"
