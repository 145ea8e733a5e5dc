"""Grammars accept the output of each format, and reject broken frames and schema violations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from nanovllm.errors import RequestError
from nanovllm.features.grammar.grammar_text import grammar_text
from nanovllm.serve.parsing.formats import choose_formats
from nanovllm.serve.parsing.tool_grammar import CallRules, tool_grammar
from nanovllm.serve.parsing.tools import Tool
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import running
from tests.serve.templates import TEMPLATES, WITH_TOOLS, answer_of, call

llguidance = pytest.importorskip("llguidance")

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    Tool("get_weather", WEATHER),
    Tool("get", {}),
    Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
]
STRICT = [replace(tool, is_strict=True) for tool in TOOLS]
GOOD = call("get_weather", {"city": 'a "b"\n{', "unit": "C", "days": 3})
PING = call("get_time", {})
BAD = [
    call("unknown", {}),
    call("get_weather", {}),
    call("get_weather", {"city": "a", "unit": "K"}),
    call("get_weather", {"city": "a", "days": 10}),
    call("get_weather", {"city": "a", "other": 1}),
    call("get_time", {"city": "a"}),
]
MUST, MAY = CallRules(must_call=True), CallRules(must_call=False)


def accepts(grammar: str, text: str, special_ids: dict[str, int] | None = None) -> bool:
    """Match a text byte by byte, with one token for each special marker."""
    tokens: list[int] = []
    for marker, token_id in (special_ids or {}).items():
        text = text.replace(marker, chr(0xE000 + token_id))
    for char in text:
        is_special = 0xE000 <= ord(char) < 0xF000
        tokens += [ord(char) - 0xE000] if is_special else char.encode()
    matcher = start_matcher(grammar).deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@cache
def start_matcher(grammar: str) -> Any:
    if not grammar.startswith("{"):
        grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)


def write(name: str, *calls: dict[str, Any], content: str = "") -> str:
    return answer_of(TEMPLATES[name][0], {"content": content, "tool_calls": calls})


def grammar(name: str, tools: list[Tool], rules: CallRules) -> str:
    tool_format = choose_formats(TEMPLATES[name][0]).tools
    assert tool_format is not None
    return tool_grammar(tool_format, tools, rules)


def after_reasoning(calls: str, **before: str) -> str:
    asked = {**before, "after": "</think>", "grammar": calls}
    return grammar_text(asked, llguidance.LLTokenizer("byte"))


TEMPLATE = pytest.mark.parametrize("name", WITH_TOOLS)


@TEMPLATE
def test_calls_that_must_come(name: str) -> None:
    lark = grammar(name, TOOLS, MUST)
    assert accepts(lark, write(name, GOOD))
    assert accepts(lark, write(name, PING, GOOD, call("get", {})))
    for bad in BAD:
        assert not accepts(lark, write(name, bad))
        assert not accepts(lark, write(name, GOOD, bad))
    assert not accepts(lark, "")
    assert not accepts(lark, "Hello")
    assert not accepts(lark, write(name, GOOD, content="Hello"))
    assert not accepts(lark, write(name, GOOD) + "Hello")
    assert not accepts(lark, write(name, GOOD)[:-1])


@TEMPLATE
def test_one_call_if_not_parallel(name: str) -> None:
    for rules in (MUST, MAY):
        lark = grammar(name, TOOLS, replace(rules, is_parallel=False))
        assert accepts(lark, write(name, GOOD))
        assert not accepts(lark, write(name, GOOD, GOOD))


@TEMPLATE
def test_one_tool_that_is_forced(name: str) -> None:
    lark = grammar(name, TOOLS[:1], MUST)
    assert accepts(lark, write(name, GOOD))
    assert not accepts(lark, write(name, PING))


def test_arguments_of_calls_are_written_as_any_json_that_is_enforced() -> None:
    """A name written as \\u0061 would not be recognized as a property of the schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with running(FakeLLM()) as server:
        messages = [{"role": "user", "content": "x"}]
        server.post("/v1/chat/completions", messages=messages, tools=[tool], tool_choice="required")
        asked = server.llm.asked[-1][1].structured_outputs
    frame = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    assert accepts(asked["grammar"], frame.format('{"a": 1,\n "b": "x"}'))
    for wrong in ('{"\\u0061": "x"}', '{"a":' + " " * 17 + "1}"):
        assert not accepts(asked["grammar"], frame.format(wrong)), wrong


@TEMPLATE
def test_strict_tools_among_text(name: str) -> None:
    lark = grammar(name, STRICT, MAY)
    for text in ("", "Hello", "a < b { <tool", 'The {"city": 1} [x] <｜tool'):
        assert accepts(lark, text)
        assert accepts(lark, write(name, GOOD, content=text))
    assert accepts(lark, write(name, GOOD, PING, content="Hello"))
    for bad in BAD:
        assert not accepts(lark, write(name, bad, content="Hello"))


@TEMPLATE
def test_tools_that_are_not_strict_take_any_arguments(name: str) -> None:
    lark = grammar(name, TOOLS, MAY)
    assert accepts(lark, write(name, call("get_weather", {"other": 1})))
    assert not accepts(lark, write(name, call("unknown", {})))


@TEMPLATE
@pytest.mark.parametrize("rules", [MUST, MAY], ids=["must", "may"])
def test_reasoning_comes_first(name: str, rules: CallRules) -> None:
    tools = STRICT
    thought = f"So {write(name, BAD[0])}?\n</think>\n\n"
    calls = grammar(name, tools, replace(rules, has_reasoning=True))
    lark = after_reasoning(calls, opened_by="<think>")
    for before in ("", f"<think>\n{thought}", "<think></think>"):
        assert accepts(lark, before + write(name, GOOD))
        assert not accepts(lark, before + write(name, BAD[0]))
    lark = after_reasoning(calls)
    assert accepts(lark, thought + write(name, GOOD))
    assert not accepts(lark, thought + write(name, BAD[0]))
    assert not accepts(lark, "So\n")


@pytest.mark.parametrize("rules", [MUST, MAY], ids=["must", "may"])
def test_markers_that_are_special_tokens(rules: CallRules) -> None:
    ids = {"[TOOL_CALLS]": 256, "[ARGS]": 257}
    lark = grammar("mistral_args", STRICT, replace(rules, special_ids=ids))
    text = write("mistral_args", GOOD, PING)
    assert accepts(lark, text, ids)
    assert not accepts(lark, text.replace(":", ""), ids)
    assert accepts(lark, write("mistral_args", GOOD)) == (not rules.must_call)


def test_text_in_tags_ends_where_the_parser_ends_it() -> None:
    lark = grammar("qwen3_coder", TOOLS, MUST)
    for city in ("a\n<parameter=b", "a\n</function>", "a</parameter>b"):
        assert not accepts(lark, write("qwen3_coder", call("get_weather", {"city": city})))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern'"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1}]}}}, "'maxLength'"),
        ({"oneOf": []}, "'oneOf'"),
        ({"properties": {}, "required": ["b"]}, "properties must be schemas"),
        ({"properties": {"a": True}}, "properties must be schemas"),
    ],
)
def test_what_tags_cannot_enforce_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grammar("qwen3_coder", [Tool("f", parameters)], MUST)


def test_schemas_are_rewritten() -> None:
    rules = replace(MUST, rewrite=lambda schema: {**schema, "maxProperties": 0})
    lark = grammar("qwen3", TOOLS[1:2], rules)
    assert accepts(lark, write("qwen3", call("get", {})))
    assert not accepts(lark, write("qwen3", call("get", {"a": 1})))
