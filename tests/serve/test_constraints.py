"""Constrained completions: a schema, a choice, a tool call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from tests.serve.byte_model import byte_tokenizer
from tests.serve.running import Running

MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "number": {"enum": [1, 22]}},
    "required": ["yes", "number"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("one", "two")
]
CHOICE = {"structured_outputs": {"choice": ["yes"]}, "chat_template_kwargs": {}}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(server: Running, **fields: Any) -> Any:
    extra = {**NO_THOUGHTS, **fields.pop("extra_body", {})}
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150, **fields}
    return server.openai.chat.completions.create(**fields, extra_body=extra).choices[0]


def fits(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"yes", "number"} and value["number"] in (1, 22)


@pytest.mark.parametrize("seed", range(2))
def test_a_schema_is_kept(server: Running, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = ask(server, response_format=form, seed=seed)
    assert choice.finish_reason == "stop"
    assert fits(choice.message.content)
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = server.openai.responses.create(
        model="tiny", input="x", text=text, reasoning={"effort": "none"}
    )
    assert fits(answer.output_text)


def test_completions_have_constraints_too(server: Running) -> None:
    constraint = {"structured_outputs": {"choice": ["red", "blue"]}}
    answer = server.openai.completions.create(model="tiny", prompt="x", extra_body=constraint)
    assert answer.choices[0].text in ("red", "blue")


@pytest.mark.parametrize(
    ("field", "properties", "pattern"),
    [
        ("response_format", {"a" * 40 + "!": {}}, "^(a+)+$"),
        ("tools", {"a" * 40 + "!": {}}, "^(a+)+$"),
        ("structured_outputs", {"a" * 40 + "!": {}}, "^(a+)+$"),
        ("response_format", {}, "[" * 60_000),
        ("structured_outputs", {}, "[" * 60_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_no_pattern_backtracks(
    server: Running, field: str, properties: dict[str, Any], pattern: str
) -> None:
    """Python's `re` would take forever while it holds the GIL."""
    schema = {"properties": properties, "patternProperties": {pattern: {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"response_format": form, "tools": [tool], "structured_outputs": {"json": schema}}
    body = {"messages": MESSAGES, "max_tokens": 1, **NO_THOUGHTS, field: asked[field]}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == (200 if properties else 400), response.text
    assert properties or response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ("one", "two")),
        ({"type": "function", "function": {"name": "two"}}, ("two",)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_made_by_its_schema(
    server: Running, choice: Any, names: tuple[str, ...], stream: bool
) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    if stream:
        request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150, **options}
        with server.openai.chat.completions.stream(**request, extra_body=NO_THOUGHTS) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = ask(server, **options)
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    assert fits(call.function.arguments)
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content


def test_a_named_tool_is_called_once_unless_more_is_asked_for(server: Running) -> None:
    options = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "two"}}}
    for seed in range(8):
        assert len(ask(server, **options, seed=seed).message.tool_calls) == 1
    several = {**options, "parallel_tool_calls": True}
    assert any(len(ask(server, **several, seed=s).message.tool_calls) > 1 for s in range(8))


def test_a_tool_of_messages_may_be_forced(server: Running) -> None:
    tools = [{"name": "one", "input_schema": SCHEMA}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"messages": MESSAGES, "max_tokens": 150, "tools": tools, "tool_choice": choice}
    answer = server.post("/v1/messages", **body, thinking={"type": "disabled"}).json()
    (block,) = answer["content"]
    assert (block["type"], block["name"]) == ("tool_use", "one")
    assert fits(json.dumps(block["input"]))


def test_reasoning_comes_before_what_is_constrained(server: Running) -> None:
    """Reasoning is unconstrained; without its end marker there is no content."""
    options = {**CHOICE, "add_generation_prompt": False, "continue_final_message": True}
    for begun in ("<think>", "<think>\nHm, so", [{"type": "text", "text": "<think>"}, "Hm"]):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        choice = ask(server, messages=messages, max_tokens=20, extra_body=options)
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert choice.message.reasoning_content


def test_a_model_that_does_not_think_answers_at_once(server: Running) -> None:
    alphabet = byte_tokenizer().get_vocab()
    plain, pushed = (
        ask(server, max_tokens=20, extra_body=CHOICE, logit_bias={alphabet[letter]: 100})
        for letter in "y<"
    )
    assert (plain.finish_reason, plain.message.content) == ("stop", "yes")
    assert not hasattr(plain.message, "reasoning_content")
    assert (pushed.finish_reason, pushed.message.content) == ("length", "")
    assert pushed.message.reasoning_content


def test_a_constraint_may_name_where_it_begins(server: Running) -> None:
    """The request's `after` takes precedence over the model's reasoning format."""
    constraint = {"choice": ["yes"], "after": "x", "opened_by": "x"}
    extra = {**CHOICE, "structured_outputs": constraint}
    for seed in range(4):
        assert ask(server, max_tokens=3, extra_body=extra, seed=seed).message.content[0] in "xy"
    free = {**CHOICE, "structured_outputs": {"choice": ["yes"], "after": "x"}}
    bias = {byte_tokenizer().get_vocab()["a"]: 100}
    choice = ask(server, max_tokens=3, extra_body=free, logit_bias=bias)
    assert choice.message.content == "aaa"  # text before `after` needs no start marker


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(server: Running, mode: str) -> None:
    function = {"type": "function", "function": {"name": "two"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function]}}
    answer = ask(server, tools=TOOLS, tool_choice=allowed, seed=5)
    assert {call.function.name for call in answer.message.tool_calls or ()} <= {"two"}
    assert mode == "auto" or answer.message.tool_calls
    flat = [{"type": "function", **tool["function"], "strict": None} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "two"}]}
    response = server.openai.responses.create(
        model="tiny",
        input="x",
        tools=flat,
        tool_choice=choice,
        max_output_tokens=150,
        reasoning={"effort": "none"},
    )
    names = {item.name for item in response.output if item.type == "function_call"}
    assert names <= {"two"}
    assert mode == "auto" or names


def test_an_allowed_tool_must_be_one(server: Running) -> None:
    function = {"type": "function", "function": {"name": "three"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function]}}
    with pytest.raises(BadRequestError, match="three"):
        ask(server, tools=TOOLS, tool_choice=allowed)
