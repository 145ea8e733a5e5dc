"""Typical uses of LangChain, run in its environment."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = os.environ["NANOVLLM_URL"]
OBEDIENT_URL = os.environ["NANOVLLM_OBEDIENT_URL"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Place(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]


@tool(args_schema=Place)
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"Say: It is sunny in {city}."


class Weather(BaseModel, extra="forbid"):
    """The weather in a city."""

    sky: Literal["clear", "cloudy"]
    is_warm: bool


def openai_chat(url: str, **options: Any) -> Any:
    return ChatOpenAI(model="tiny", base_url=f"{url}/v1", max_retries=0, **options)


def anthropic_chat(url: str, **options: Any) -> Any:
    return ChatAnthropic(model="tiny", base_url=url, max_retries=0, max_tokens=200, **options)


CHATS = pytest.mark.parametrize("chat", [openai_chat, anthropic_chat])


@CHATS
def test_invoke_stream_and_batch(chat: Any) -> None:
    model = chat(OBEDIENT_URL)
    messages = [SystemMessage("Be brief."), HumanMessage("Say: Good day.")]
    answer = model.invoke(messages)
    assert answer.text == "Good day."
    assert answer.usage_metadata["output_tokens"] == len("Good day.")
    whole = AIMessageChunk("")
    for chunk in model.stream(messages, stream_usage=True):
        whole += chunk
    assert whole.text == "Good day."
    assert whole.usage_metadata["output_tokens"] == len("Good day.")
    texts = [answer.text for answer in model.batch(["Say: one", "Say: two"])]
    assert texts == ["one", "two"]
    assert asyncio.run(model.ainvoke("Say: three")).text == "three"


@CHATS
def test_tools_are_called_and_answered(chat: Any) -> None:
    model = chat(OBEDIENT_URL).bind_tools([weather])
    messages: list[Any] = [HumanMessage(f"Say: {CALL}")]
    answer = model.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = model.invoke([*messages, answer, result])
    assert final.text == "It is sunny in Rome."
    whole = AIMessageChunk("")
    for chunk in model.stream(messages):
        whole += chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Rome"}]


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_answers_of_a_type(method: Any) -> None:
    if method == "json_mode":
        model = openai_chat(OBEDIENT_URL)
        question = 'Say: {"sky": "clear", "is_warm": true}'
    else:
        model = openai_chat(URL, reasoning_effort="none", max_tokens=200)
        question = "Weather?"
    answer = model.with_structured_output(Weather, method=method).invoke(question)
    assert isinstance(answer, Weather)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_anthropic_answers_of_a_type(method: Any) -> None:
    model = anthropic_chat(URL, thinking={"type": "disabled"})
    answer = model.with_structured_output(Weather, method=method).invoke("Weather?")
    assert isinstance(answer, Weather)


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_tools_may_be_demanded(choice: str) -> None:
    model = openai_chat(URL, reasoning_effort="none", max_tokens=200)
    options: Any = {"parallel_tool_calls": False, "strict": True}
    bound = model.bind_tools([weather], tool_choice=choice, **options)
    (call,) = bound.invoke("Hello").tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")


def test_logprobs_and_options() -> None:
    model = openai_chat(URL, logprobs=True, top_logprobs=2, max_tokens=5, seed=1, n=1)
    answer = model.invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]


def test_the_responses_api() -> None:
    model = openai_chat(OBEDIENT_URL, use_responses_api=True)
    bound = model.bind_tools([weather])
    messages: list[Any] = [HumanMessage(f"Say: <think>Hm.</think>See.{CALL}")]
    answer = bound.invoke(messages)
    assert answer.text == "See."
    final = bound.invoke([*messages, answer, weather.invoke(answer.tool_calls[0])])
    assert final.text == "It is sunny in Rome."
    assert "".join(chunk.text for chunk in model.stream("Say: Good day.")) == "Good day."


def test_thoughts() -> None:
    model = ChatAnthropic(
        model="tiny",
        base_url=OBEDIENT_URL,
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    answer = model.invoke("Say: <think>Hm.</think>Yes.")
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]


def test_embeddings_and_completions() -> None:
    embeddings = OpenAIEmbeddings(
        model="tiny", base_url=f"{URL}/v1", check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["one", "two"])
    assert len(vectors) == 2
    assert embeddings.embed_query("one") == pytest.approx(vectors[0], abs=1e-5)
    completion = OpenAI(model="tiny", base_url=f"{URL}/v1", max_tokens=8)
    assert isinstance(completion.invoke("Once"), str)
