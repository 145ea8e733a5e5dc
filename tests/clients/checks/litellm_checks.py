"""Typical uses of LiteLLM, run in its environment."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

REAL, OBEDIENT, BUSY = (
    os.environ[name] for name in ("NANOVLLM_URL", "NANOVLLM_OBEDIENT_URL", "NANOVLLM_BUSY_URL")
)
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}},
    },
}
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    is_warm: bool


def where(provider: str, url: str) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    key = os.environ["OPENAI_API_KEY"]
    return {"model": f"{provider}/tiny", "api_base": base, "api_key": key, "max_retries": 0}


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Say: {text}"}]


@PROVIDERS
def test_completions_and_streams(provider: str) -> None:
    options: Any = {**where(provider, OBEDIENT), "messages": say("Good day."), "max_tokens": 100}
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content == "Good day."
    assert answer.usage.completion_tokens == len("Good day.")
    chunks = list(litellm.completion(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Good day."
    answer = asyncio.run(litellm.acompletion(**options))
    assert answer.choices[0].message.content == "Good day."

    async def stream() -> str:
        pieces = await litellm.acompletion(**options, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    assert asyncio.run(stream()) == "Good day."


@PROVIDERS
@pytest.mark.parametrize("stream", [False, True])
def test_tools(provider: str, stream: bool) -> None:
    options: Any = {**where(provider, OBEDIENT), "tools": [WEATHER], "max_tokens": 200}
    messages = say(f"<think>Hm.</think>{CALL}")
    answer = litellm.completion(**options, messages=messages, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == (
        "weather",
        '{"city":"Rome"}',
    )
    assert message.reasoning_content == "Hm."
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "Say: It is sunny."}
    final = litellm.completion(**options, messages=[*messages, message.model_dump(), result])
    assert final.choices[0].message.content == "It is sunny."


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_answers_of_a_type(provider: str) -> None:
    answer = litellm.completion(
        **where(provider, REAL),
        messages=HELLO,
        response_format=Weather,
        max_tokens=200,
        reasoning_effort="none",
        allowed_openai_params=["reasoning_effort"],
    )
    Weather.model_validate_json(answer.choices[0].message.content)


def test_embeddings() -> None:
    for encoding in ({}, {"encoding_format": "float"}):
        answer = litellm.embedding(**where("openai", REAL), input=["one", "two"], **encoding)
        assert len(answer.data) == 2


def test_responses_and_messages() -> None:
    place = where("openai", OBEDIENT)
    answer = litellm.responses(**place, input="Say: Good day.")
    assert answer.output[-1].content[0].text == "Good day."
    events = list(litellm.responses(**place, input="Say: Good day.", stream=True))
    assert events[-1].type == "response.completed"

    async def messages() -> Any:
        return await litellm.anthropic.messages.acreate(
            **where("anthropic", OBEDIENT), messages=say("Good day."), max_tokens=50
        )

    assert asyncio.run(messages())["content"][0]["text"] == "Good day."


@PROVIDERS
def test_errors_are_exceptions_of_their_kinds(provider: str) -> None:
    ask: Any = {**where(provider, REAL), "messages": HELLO, "max_tokens": 10}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**ask, "temperature": 3.0})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ask, "messages": say("x" * 5000)})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ask, "model": f"{provider}/other"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**ask, "api_key": "wrong"})
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**{**ask, **where(provider, BUSY)}, num_retries=0)
