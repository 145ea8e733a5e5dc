"""Typical uses of `anthropic`, run in its environment."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

URL = os.environ["NANOVLLM_URL"]
REAL = Anthropic(base_url=URL, max_retries=0)
OBEDIENT = Anthropic(base_url=os.environ["NANOVLLM_OBEDIENT_URL"], max_retries=0)
BUSY = Anthropic(base_url=os.environ["NANOVLLM_BUSY_URL"], max_retries=0)
HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
NO_THOUGHTS: Any = {"thinking": {"type": "disabled"}}


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    is_warm: bool


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Say: {text}"}]


def ask(client: Anthropic, messages: Any, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 200, **options}
    return client.messages.create(messages=messages, **options)


def num_prompt(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_messages_and_their_streams_are_the_same() -> None:
    options: Any = {"max_tokens": 20, "extra_body": {"temperature": 0}}
    whole = ask(REAL, HELLO, **options)
    with REAL.messages.stream(model="tiny", messages=HELLO, **options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason
    assert num_prompt(final.usage) == num_prompt(whole.usage) > 0
    events = list(ask(REAL, HELLO, stream=True, **options))
    assert num_prompt(events[0].message.usage) == num_prompt(whole.usage)
    assert events[-1].type == "message_stop"


def test_systems_and_marks_for_caches() -> None:
    cached = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": "Say: the system", "cache_control": cached}]
    parts = [{"type": "text", "text": "Hello", "cache_control": {**cached, "ttl": "1h"}}]
    answer = ask(OBEDIENT, [{"role": "user", "content": parts}], system=system)
    assert answer.content[0].text == "the system"
    options: Any = {"metadata": {"user_id": "me"}, "stop_sequences": ["xyz"]}
    options["extra_body"] = {"top_k": 5, "top_p": 0.9}
    assert ask(OBEDIENT, HELLO, system="Say: a text", **options).content[0].text == "a text"


def test_thoughts_are_blocks_and_may_be_sent_back() -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    messages = say("<think>Hm.</think>Yes.")
    answer = ask(OBEDIENT, messages, thinking=thinking, max_tokens=2000)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "Hm."
    assert answer.content[0].signature
    with OBEDIENT.messages.stream(
        model="tiny", messages=messages, thinking=thinking, max_tokens=2000
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= set(kinds)
    assert final.content[0].thinking == "Hm."
    assert final.content[0].signature == answer.content[0].signature
    history = [*messages, {"role": "assistant", "content": answer.content}, *say("More.")]
    assert ask(OBEDIENT, history).content[0].text == "More."


def test_a_model_may_use_tools_and_read_their_results() -> None:
    messages = say(f"Let me see.{CALL}{CALL.replace('Rome', 'Oslo')}")
    answer = ask(OBEDIENT, messages, tools=[WEATHER])
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [block.input["city"] for block in answer.content[1:]] == ["Rome", "Oslo"]
    with OBEDIENT.messages.stream(
        model="tiny", max_tokens=200, messages=messages, tools=[WEATHER]
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 2
    assert [block.input for block in final.content[1:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": "Say: It is sunny."}],
            "is_error": False,
        }
        for block in answer.content[1:]
    ]
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    last = ask(OBEDIENT, [*messages, *turns], tools=[WEATHER])
    assert last.content[0].text == "It is sunny."
    assert last.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_may_be_demanded(choice: Any) -> None:
    choice["disable_parallel_tool_use"] = True
    answer = ask(REAL, HELLO, tools=[WEATHER], tool_choice=choice, **NO_THOUGHTS)
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.input["city"] in ("Rome", "Oslo")


def test_answers_are_parsed() -> None:
    answer = REAL.messages.parse(
        model="tiny", max_tokens=200, messages=HELLO, output_format=Weather, **NO_THOUGHTS
    )
    assert isinstance(answer.parsed_output, Weather)


def test_an_answer_may_be_begun() -> None:
    """If the last message is the assistant's, the completion continues it."""
    history = [*HELLO, {"role": "assistant", "content": "Well, "}]
    begun = REAL.messages.count_tokens(model="tiny", messages=history).input_tokens
    plain = REAL.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert begun == plain + len("Well, ")


def test_tokens_are_counted() -> None:
    counted = REAL.messages.count_tokens(
        model="tiny", messages=HELLO, system="Be brief.", tools=[WEATHER]
    )
    answer = ask(REAL, HELLO, system="Be brief.", tools=[WEATHER], max_tokens=1)
    assert counted.input_tokens == num_prompt(answer.usage)
    assert answer.stop_reason == "max_tokens"


def test_the_runner_of_tools_calls_them() -> None:
    """Newer clients request a thread first, and retry without one."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather."""
        return f"Say: It is sunny in {city}."

    run = OBEDIENT.beta.messages.tool_runner
    final = run(model="tiny", max_tokens=200, messages=say(CALL), tools=[weather]).until_done()
    assert final.content[0].text == "It is sunny in Rome."


def test_models_are_listed() -> None:
    assert [model.id for model in REAL.models.list()] == ["tiny"]
    assert REAL.models.retrieve("tiny").display_name == "tiny"


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": say("x" * 5000)}, anthropic.BadRequestError),
        ({"extra_body": {"seed": 1}}, anthropic.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_exceptions_of_their_kinds(wrong: Any, kind: Any, stream: bool) -> None:
    with pytest.raises(kind) as caught:
        ask(REAL, **{"messages": HELLO, "stream": stream, **wrong})
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["message"]
    assert caught.value.request_id


def test_a_full_server_says_so_and_a_guarded_one() -> None:
    with pytest.raises(anthropic.AuthenticationError):
        ask(REAL.with_options(api_key="wrong"), HELLO)
    with pytest.raises(anthropic.RateLimitError):
        ask(BUSY, HELLO)


def test_many_at_once() -> None:
    async def main() -> None:
        async with AsyncAnthropic(base_url=URL, max_retries=0) as client:
            create = client.messages.create
            options: Any = {"model": "tiny", "messages": HELLO}
            answers = await asyncio.gather(*(create(**options, max_tokens=8) for _ in range(8)))
            assert all(answer.usage.output_tokens <= 8 for answer in answers)
            async with client.messages.stream(**options, max_tokens=3000) as stream:
                async for _ in stream:
                    break
            is_canceled = False
            while not is_canceled:  # a completion may have finished by then
                task = asyncio.create_task(create(**options, max_tokens=3000))
                await asyncio.sleep(0.1)
                is_canceled = task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
