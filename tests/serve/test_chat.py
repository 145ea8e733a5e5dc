"""/v1/chat/completions with OpenAI's client: whole responses, streams, tools and reasoning."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, BadRequestError

from nanovllm.errors import EngineError
from nanovllm.serve.prepare_chat import VisibleText
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import Running, running
from tests.serve.templates import read_template

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeLLM()) as server:
        yield server


def ask(server: Running, **options: Any) -> Any:
    options = {"model": "tiny", "messages": MESSAGES, **options}
    return server.openai.chat.completions.create(**options)


def gather(stream: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Return the message and finish reason of each choice of a stream, and the chunks' usage."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(str))
    usages = []
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            found = choices[choice.index]
            for name, value in choice.delta.to_dict().items():
                if name != "tool_calls":
                    found[name] += value
            for call in choice.delta.tool_calls or []:
                calls = found.setdefault("calls", {})
                name, arguments = calls.get(call.index, ("", ""))
                new = call.function
                calls[call.index] = (name + (new.name or ""), arguments + (new.arguments or ""))
            if choice.finish_reason:
                found["finish_reason"] = choice.finish_reason
    return choices, usages


def as_gathered(choice: Any) -> dict[str, Any]:
    message = choice.message.to_dict()
    calls = message.pop("tool_calls", None)
    found = {name: value or "" for name, value in message.items() if name != "refusal"}
    if calls:
        functions = [call["function"] for call in calls]
        found["calls"] = dict(enumerate((each["name"], each["arguments"]) for each in functions))
    return {**found, "finish_reason": choice.finish_reason}


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 0.9, "seed": 1}], ids=str)
def test_a_stream_says_what_a_whole_answer_says(server: Running, options: Any) -> None:
    request = {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}, **options}
    whole = ask(server, **request)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    choices, usages = gather(ask(server, **request, stream=True, stream_options=usage))
    assert {**choices} == {choice.index: as_gathered(choice) for choice in whole.choices}
    counts = [each.completion_tokens for each in usages]
    assert counts == sorted(counts)
    assert counts[-1] == whole.usage.completion_tokens == 20 * options.get("n", 1)
    assert whole.usage.prompt_tokens == usages[0].prompt_tokens == len(
        "<|im_start|>user\nWeather in Rome?<|im_end|>\n<|im_start|>assistant\n"
    ) - len("|im_start||im_end||im_start|<><><>") + 3  # fmt: skip


def test_log_probabilities_come_with_every_token(server: Running) -> None:
    sampling = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = ask(server, max_tokens=5, logprobs=True, top_logprobs=4, **sampling)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 4
        assert token.logprob == max(best.logprob for best in token.top_logprobs) <= 0
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_the_bytes_of_tokens_make_up_the_text(server: Running) -> None:
    char = "日"
    options = {"structured_outputs": {"choice": [char]}}  # three tokens, one per byte
    answer = ask(server, logprobs=True, top_logprobs=1, reasoning_effort="none", extra_body=options)
    (choice,) = answer.choices
    assert choice.message.content == char
    assert len(choice.logprobs.content) == 3
    assert bytes(each for token in choice.logprobs.content for each in token.bytes).decode() == char


def test_answers_have_the_rest_of_the_context(server: Running) -> None:
    messages = [{"role": "user", "content": "x" * 960}]
    answer = ask(server, messages=messages, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Just text.", {"content": "Just text.", "finish_reason": "stop"}),
    (
        f"<think>\nHm.\n</think>\n\nLooking.\n{CALL}\n{CALL}",
        {
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "content": "Looking.\n",
            "calls": dict.fromkeys((0, 1), ("weather", '{"city": "Rome"}')),
            "finish_reason": "tool_calls",
        },
    ),
    (CALL, {"calls": {0: ("weather", '{"city": "Rome"}')}, "finish_reason": "tool_calls"}),
    ("<tool_call>no", {"content": "<tool_call>no", "finish_reason": "stop"}),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[text[:20] for text, _ in CASES])
@pytest.mark.parametrize("seed", range(3))
def test_calls_and_reasoning_whole_and_streamed(
    fake: Running, text: str, expected: dict[str, Any], seed: int
) -> None:
    fake.llm.text, fake.llm.seed = text, seed
    expected = {"role": "assistant", "content": "", **expected}
    whole = ask(fake, tools=[TOOL])
    assert as_gathered(whole.choices[0]) == expected
    choices, _ = gather(ask(fake, tools=[TOOL], stream=True))
    assert choices[0] == expected


def prompt_of(fake: Running) -> str:
    return str(fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0]))


def test_what_was_said_comes_back_into_the_prompt(fake: Running) -> None:
    """The prompt includes the server's own message, a tool result, and reasoning by either name."""
    fake.llm.text = f"<think>Hm.</think>{CALL}"
    message = ask(fake, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    ask(fake, tools=[TOOL], messages=[*MESSAGES, message, result])
    prompt = prompt_of(fake)
    assert "<think>Hm.</think>" + CALL in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": [{"type": "text", "text": "Yes"}], name: "So."}
        ask(fake, messages=[*MESSAGES, said, *MESSAGES])
        assert "<think>So.</think>Yes<|im_end|>" in prompt_of(fake)


def test_templates_are_told_what_requests_say(fake: Running) -> None:
    ask(fake, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt_of(fake).endswith("<think>\n\n</think>\n\n")
    ask(fake, reasoning_effort="none")
    assert prompt_of(fake).endswith("<think>\n\n</think>\n\n")
    said = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    ask(fake, messages=said, extra_body=options)
    assert prompt_of(fake).endswith("assistant\nIt is")
    ask(fake, messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES])
    assert "<|im_start|>system\nBe brief." in prompt_of(fake)
    ask(fake, tools=[TOOL], tool_choice="none")
    assert "weather" not in prompt_of(fake)


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    llm = FakeLLM("Some text that is cut", failure=EngineError("the core died"))
    with running(llm) as server:
        with pytest.raises(APIError, match="the core died"):
            list(ask(server, stream=True))
        lines = server.post("/v1/completions", prompt="x", stream=True).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["message"] == "the core died"
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_stream_that_cannot_begin_has_a_status(server: Running) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(server, messages=[{"role": "user", "content": "x" * 1025}], stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_what_clients_add_to_messages_is_not_written(fake: Running) -> None:
    function = {"name": "weather", "arguments": "{}", "parsed_arguments": {"city": "MARK"}}
    call = {"id": "x", "type": "function", "function": function}
    said = {"role": "assistant", "tool_calls": [call], "parsed": {"a": "MARK"}}
    said["provider_specific_fields"] = {"refusal": "MARK"}
    ask(fake, messages=[*MESSAGES, said, {"role": "tool", "tool_call_id": "x", "content": "y"}])
    assert "MARK" not in fake.llm.input_processor.tokenizer.decode(fake.llm.asked[-1][0])


def test_what_is_asked_for_of_the_prompt_stands_beside_the_choices(server: Running) -> None:
    asked = {"return_token_ids": True, "prompt_logprobs": 1}
    whole = ask(server, max_tokens=3, temperature=0, extra_body=asked)
    ids = whole.prompt_token_ids
    assert len(ids) == len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    assert whole.prompt_logprobs[0] is None
    for token_id, known in zip(ids[1:], whole.prompt_logprobs[1:], strict=True):
        assert known[str(token_id)]["logprob"] <= 0
    chunks = list(ask(server, max_tokens=3, temperature=0, extra_body=asked, stream=True))
    assert chunks[0].prompt_token_ids == ids
    assert chunks[-1].prompt_logprobs == whole.prompt_logprobs


def test_streams_have_the_ids_of_tokens_whose_text_is_held_back(server: Running) -> None:
    asked = {"return_token_ids": True, "ignore_eos": True, "logit_bias": {"162": 100}}
    request = {"max_tokens": 4, "temperature": 0, "extra_body": asked}  # not valid UTF-8
    (whole,) = ask(server, **request).choices
    chunks = ask(server, **request, stream=True)
    ids = [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids]
    assert ids == whole.token_ids == [162] * 4


CHAIN = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": {**CHAIN, "3000": {}}}, "limit of"),
        ({"propertyNames": {"pattern": "[" * 60_000}}, "propertyNames"),
    ],
    ids=["chain", "pattern"],
)
def test_schemas_of_tools_have_limits(schema: dict[str, Any], reason: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    refused = pytest.raises(BadRequestError, match=reason)
    with running(FakeLLM(max_len=10**6)) as server, refused as caught:
        ask(server, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


def test_tools_that_the_template_cannot_show_are_refused() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(FakeLLM(), chat_template=template, tool_call_parser="hermes") as server:
        with pytest.raises(BadRequestError, match="does not show tools") as caught:
            ask(server, tools=[TOOL])
        assert caught.value.param == "tools"
        assert "--tool-call-parser" not in str(caught.value)  # it is set
        assert ask(server).choices[0].message.content == "Hello!"
    unknown = pytest.raises(BadRequestError, match="is unknown; set --tool-call-parser")
    with running(FakeLLM(), chat_template="{{ tools }}" + template) as server, unknown:
        ask(server, tools=[TOOL])


class WithMarkers(FakeLLM):
    """A tokenizer whose tool-call marker is a special token, as in Llama."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.input_processor.tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|python_tag|>"]}
        )

    def _cut(self) -> list[str]:
        return re.findall(r"<.*?>|[^<]+", self.text)


def test_special_tokens_that_mark_nothing_are_not_shown() -> None:
    text = "Not <|im_end|> yet. <|im_start|>Now.<|im_end|>"
    with running(WithMarkers(text=text), chat_template=read_template("llama3")) as server:
        (whole,) = ask(server).choices
        choices, _ = gather(ask(server, stream=True))
        assert whole.message.content == choices[0]["content"] == "Not  yet. Now."
        shown = {"extra_body": {"skip_special_tokens": False}}
        (whole,) = ask(server, **shown).choices
        choices, _ = gather(ask(server, stream=True, **shown))
        assert whole.message.content == choices[0]["content"] == text


class Thinking(WithMarkers):
    """A tokenizer whose reasoning markers are single tokens, as in Qwen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.input_processor.tokenizer.add_tokens(["<think>", "</think>"])


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("<think>\nHm.\n</think>\n\nHi", 7),  # letters are single tokens too
        ("<think>\nHm.", 5),  # cut off
        ("Hi</think>", 0),
    ],
)
def test_tokens_of_thoughts_are_counted(text: str, num_tokens: int) -> None:
    with running(Thinking(text=text)) as server:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        _, streamed = gather(ask(server, **usage))
        for each in (ask(server).usage, streamed[-1]):
            assert each.completion_tokens_details.reasoning_tokens == num_tokens
        response = server.openai.responses.create(model="tiny", input="x")
        assert response.usage.output_tokens_details.reasoning_tokens == num_tokens


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        ([("A<|im_end", [1, 7]), ("|>B", [2]), ("C", [3])], "ABC"),  # held back as a possible stop
        ([("A", [1, 7]), ("<|im_", []), ("x", [2])], "A<|im_x"),
        ([("A<|im_end|>B<|im_end|><|im_end|>", [1, 7, 2, 7, 7])], "AB"),
        ([("A<", [1, 7])], "A<"),  # cut by a stop string
    ],
)
def test_texts_of_special_tokens_may_come_after_their_ids(
    updates: list[tuple[str, list[int]]], text: str
) -> None:
    visible, found = VisibleText({7: "<|im_end|>"}), ""
    for i, (piece, ids) in enumerate(updates, 1):
        found += visible.feed(piece, ids, has_more=i < len(updates))
    assert found == text


def test_many_special_tokens_are_hidden_in_no_time() -> None:
    visible = VisibleText({7: "<|im_end|>"})
    start = time.thread_time()
    text = visible.feed("<|im_end|>a" * 20000, [7, 1] * 20000, has_more=False)
    assert text == "a" * 20000
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(("stop", "reason"), [('"city"', "stop"), ("</tool_call>", "tool_calls")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_none_to_follow(
    server: Running, stop: str, reason: str, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    options: Any = {"tools": [tool], "tool_choice": "required", "reasoning_effort": "none"}
    answer = ask(server, **options, max_tokens=500, temperature=0, stop=stop, stream=stream)
    last = list(answer)[-1] if stream else answer
    assert last.choices[0].stop_reason == stop
    assert last.choices[0].finish_reason == reason
