"""Uses of `openai` that tests/serve, with the same version, does not have: helpers and errors."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import urllib.request
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

URL = os.environ["NANOVLLM_URL"]
REAL = OpenAI(base_url=f"{URL}/v1", max_retries=0)
OBEDIENT = OpenAI(base_url=f"{os.environ['NANOVLLM_OBEDIENT_URL']}/v1", max_retries=0)
HELLO: Any = [{"role": "user", "content": "Hello"}]
NO_THOUGHTS: Any = {"reasoning_effort": "none"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Weather(BaseModel):
    """The weather in a city."""

    sky: Literal["clear", "cloudy"]
    is_warm: bool


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": None}}
# The same tool in the format of the Responses API.
FLAT: Any = {"type": "function", **WEATHER["function"], "strict": True}


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Say: {text}"}]


def chat(client: OpenAI, messages: Any, **options: Any) -> Any:
    options = {"max_tokens": 200, "temperature": 0, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_the_helper_for_streams_tells_events() -> None:
    with OBEDIENT.chat.completions.stream(
        model="tiny", messages=say(f"Let me see.{CALL}"), tools=[WEATHER]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.content == "Let me see."
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


def test_chunks_have_one_id_a_role_logprobs_and_the_usage() -> None:
    asked: Any = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    asked["extra_body"] = {"ignore_eos": True}
    chunks = list(chat(REAL, HELLO, max_tokens=5, stream=True, **asked))
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    tokens = [each for choice in choices for each in choice.logprobs.content]
    assert len(tokens) == 5
    assert all(len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_may_be_demanded(choice: Any, stream: bool) -> None:
    options: Any = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        with REAL.chat.completions.stream(
            model="tiny", messages=HELLO, max_tokens=200, **options, **NO_THOUGHTS
        ) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = chat(REAL, HELLO, **options, **NO_THOUGHTS).choices[0]
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.finish_reason in ("tool_calls", "stop")


def test_tools_may_be_forbidden() -> None:
    answer = chat(OBEDIENT, say("No."), tools=[WEATHER], tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content == "No."


def test_some_of_the_tools_may_be_allowed() -> None:
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "weather"}}],
        },
    }
    answer = chat(REAL, HELLO, tools=[TIME, WEATHER], tool_choice=allowed, **NO_THOUGHTS)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"weather"}


def test_answers_are_parsed() -> None:
    parse = REAL.chat.completions.parse
    answer = parse(
        model="tiny", messages=HELLO, response_format=Weather, max_tokens=200, **NO_THOUGHTS
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with REAL.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Weather, max_tokens=200, **NO_THOUGHTS
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    answer = parse(
        model="tiny",
        messages=HELLO,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        **NO_THOUGHTS,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(model="tiny", messages=HELLO, response_format=Weather, max_tokens=2, **NO_THOUGHTS)


def test_any_json_may_be_asked_for() -> None:
    form = {"type": "json_object"}
    answer = chat(OBEDIENT, say('{"a": 1}'), response_format=form, **NO_THOUGHTS)
    assert json.loads(answer.choices[0].message.content) == {"a": 1}


def test_embeddings_and_models() -> None:
    texts = ["one", "two"]
    packed = REAL.embeddings.create(model="tiny", input=texts)  # base64 by default
    plain = REAL.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-4)
    assert [model.id for model in REAL.models.list()] == ["tiny"]
    assert REAL.models.retrieve("tiny").owned_by


def test_responses() -> None:
    answer = OBEDIENT.responses.create(
        model="tiny", input=f"Say: <think>Hm.</think>See.{CALL}", tools=[FLAT], instructions="Help."
    )
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "See."
    call = answer.output[-1]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "Say: It is sunny.",
    }
    history = [{"role": "user", "content": "Weather?"}, *answer.output, result]
    final = OBEDIENT.responses.create(model="tiny", input=history, tools=[FLAT], store=False)
    assert final.output_text == "It is sunny."
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


def test_streams_of_responses() -> None:
    with OBEDIENT.responses.stream(
        model="tiny", input=f"Say: <think>Hm.</think>See.{CALL}", tools=[FLAT]
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[-1].type == "response.completed"
    assert final.output_text == "See."
    assert final.output[-1].parsed_arguments is not None
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_are_parsed() -> None:
    options: Any = {"model": "tiny", "input": "Weather?", "reasoning": {"effort": "none"}}
    options |= {"max_output_tokens": 200}
    answer = REAL.responses.parse(**options, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    with REAL.responses.stream(**options, text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)["function"]
    answer = REAL.responses.create(
        **options, tools=[{"type": "function", **tool}], tool_choice="required"
    )
    assert {item.type for item in answer.output} == {"function_call"}


@pytest.mark.parametrize(
    ("wrong", "kind", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, None),
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"messages": say("x" * 5000)}, openai.BadRequestError, "context_length_exceeded"),
        ({"messages": []}, openai.BadRequestError, None),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, None),
        ({"extra_headers": {"Authorization": "Bearer wrong"}}, openai.AuthenticationError,
         "invalid_api_key"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_exceptions_of_their_kinds(
    wrong: Any, kind: Any, code: Any, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        REAL.chat.completions.create(
            **{"model": "tiny", "messages": HELLO, "stream": stream, **wrong}
        )
    assert caught.value.code == code
    assert caught.value.message
    assert caught.value.request_id


def test_many_at_once_and_canceled() -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{URL}/v1", max_retries=0) as client:
            create = client.chat.completions.create
            options: Any = {"model": "tiny", "messages": HELLO}
            answers = await asyncio.gather(*(create(**options, max_tokens=8) for _ in range(8)))
            assert all(answer.usage.completion_tokens <= 8 for answer in answers)
            endless: Any = {**options, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(create(**endless))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with await create(**endless, stream=True) as stream:
                async for _ in stream:
                    break
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).chat.completions.create(**endless)

    asyncio.run(main())
    wait_until_idle()


def wait_until_idle() -> None:
    """A canceled request does not continue."""
    request = urllib.request.Request(f"{URL}/load", headers={"x-api-key": REAL.api_key})
    for _ in range(100):
        with urllib.request.urlopen(request) as answer:
            if json.load(answer)["server_load"] == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server still works for clients that are gone")
