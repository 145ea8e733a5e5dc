"""Tools are parsed from requests, and arguments are converted by their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm.errors import RequestError
from nanovllm.serve.parsing.tools import Tool, as_json, read_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_tools_are_read() -> None:
    entry = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    assert read_tools([entry]) == [Tool("f", SCHEMA, True)]
    assert read_tools([{"function": {"name": "f"}}])[0].parameters["type"] == "object"


@pytest.mark.parametrize(
    "entries",
    [
        [None],
        [{"type": "retrieval"}],
        [{"type": "function"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": 'a"b'}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f"}}] * 2,
    ],
    ids=json.dumps,
)
def test_tools_that_cannot_be_read(entries: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"^tools\[[01]\]"):
        read_tools(entries)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "object"}, {"oneOf": [{"type": "number"}]}]}, {"object", "number"}),
        ({"$ref": "#/$defs/b"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere/at/all"}, set()),
        ({"type": 5, "anyOf": 1, "enum": 2, "$ref": 3}, set()),
        ({"type": None, "enum": {}}, set()),
        (True, set()),
    ],
    ids=lambda value: repr(sorted(value) if isinstance(value, set) else value),
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    definitions = {"b": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = Tool("f", {"properties": {"x": schema}, "$defs": definitions})
    assert tool.types("x") == types
    assert tool.types("y") == set()
    assert Tool("f", {"properties": []}).types("x") == set()


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("1", "integer", "1"),
        ("1.0", "integer", '"1.0"'),
        ("1", "number", "1"),
        (" true\n", "boolean", "true"),
        ("None", "null string", "null"),
        ("None", "string", '"None"'),
        ("[1, {}]", "array", "[1, {}]"),
        ("{}", "array", '"{}"'),
        ("NaN", "number", '"NaN"'),
        ('"a"', "integer string", '"\\"a\\""'),
        ("1" * 5000, "integer", json.dumps("1" * 5000)),
        ("[" * 100_000, "array", json.dumps("[" * 100_000)),
        (" x ", "integer", '" x "'),
    ],
)
def test_arguments_as_json(text: str, types: str, written: str) -> None:
    assert as_json(text, frozenset(types.split())) == written
