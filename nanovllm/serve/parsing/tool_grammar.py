"""Grammars in llguidance's Lark dialect that enforce valid tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.serve.parsing.formats import ToolCallSyntax, ToolFormat
from nanovllm.serve.parsing.tools import Schema, Tool, listed

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema"}
# If arguments are written in tags, only these schema keywords can be enforced: OBJECT_KEYS in the
# schema of all arguments, and STRING_KEYS in that of a string argument.
DEFINITIONS = {"$defs", "definitions"}
OBJECT_KEYS = ANNOTATIONS | DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
STRING_KEYS = ANNOTATIONS | {"type", "enum", "const", "anyOf"}
COMMON_RULES = r"""
TEXT: /(?s:.*)/
UNTAGGED: TEXT & ~/(?s:.*)\n(<parameter=|<\/function>)(?s:.*)/
untagged[suffix="</parameter>"]: UNTAGGED
any_parameter: "<parameter=" /[^>\n]+/ ">\n" untagged "\n"
"""


@dataclass(frozen=True, slots=True)
class CallRules:
    """The constraints that a grammar enforces."""

    # True: only calls are allowed, and all schemas are enforced. False: text is allowed too, and
    # only strict schemas are enforced.
    must_call: bool
    is_parallel: bool = True  # allow several calls instead of one
    has_reasoning: bool = False  # the output follows reasoning, so newlines may precede it
    special_ids: Mapping[str, int] = field(default_factory=dict)  # ids of all special tokens
    rewrite: Callable[[dict[str, Any]], Schema] = dict  # converts schemas to enforceable ones


def tool_grammar(tool_format: ToolFormat, tools: Sequence[Tool], rules: CallRules) -> str:
    """Return a grammar for completions that may (or must) call these tools."""
    writer = _Writer(tools, rules)
    gap = r"/\n{0,2}/ " if rules.has_reasoning else ""
    lines = [f"start: {gap}output", *writer.output(tool_format.syntaxes)]
    for i, tool in enumerate(tools):
        is_enforced = rules.must_call or tool.is_strict
        schema = {**(tool.parameters if is_enforced else {}), "type": "object"}
        if tool_format.syntaxes[0].arguments == "json":
            lines.append(f"arguments{i}: {writer.json(schema)}")
        else:
            parameters = writer.tags(tool, schema) if is_enforced else "any_parameter*"
            lines.append(f"arguments{i}: {parameters}")
    return "\n".join(lines) + COMMON_RULES


@dataclass(frozen=True, slots=True)
class _Writer:
    tools: Sequence[Tool]
    rules: CallRules

    def literal(self, text: str) -> str:
        """Return text as grammar literals; special tokens are referenced by their ids."""
        ids = self.rules.special_ids
        parts = re.split("|".join(f"({re.escape(marker)})" for marker in ids) or "(?!)", text)
        return " ".join(
            f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def json(self, schema: dict[str, Any]) -> str:
        return f"%json {json.dumps(self.rules.rewrite(schema), ensure_ascii=False)}"

    def output(self, syntaxes: Sequence[ToolCallSyntax]) -> Iterator[str]:
        syntax, separator = syntaxes[0], self.literal(syntaxes[0].separator)
        if self.rules.must_call:
            is_repeated = self.rules.is_parallel and not syntax.is_shared
            more = f" ({separator} section0)*" if is_repeated else ""
            yield f"output: section0{more}"
            yield from self.section(0, syntax, self.literal(syntax.begin + syntax.before_name))
            return
        by_opening = {syntax.opening: syntax for syntax in reversed(syntaxes)}
        for i, (opening, syntax) in enumerate(by_opening.items()):
            rest = self.literal((syntax.begin + syntax.before_name)[len(opening) :])
            if opening == "{":
                yield rf'head{i}[lazy]: TEXT /\{{\s*"name"\s*:\s*"/'
                rest = ""
            elif opening in self.rules.special_ids:
                yield f"head{i}: TEXT {self.literal(opening)}"
            else:
                yield f"head{i}[suffix={json.dumps(opening, ensure_ascii=False)}]: TEXT"
            yield from self.section(i, syntax, f"head{i} {rest}")
        sections = " | ".join(f"section{i}" for i in range(len(by_opening)))
        if self.rules.is_parallel:
            yield f"output: ({sections})* TEXT"
        else:
            yield f"output: {sections} | TEXT"

    def section(self, number: int, syntax: ToolCallSyntax, begin: str) -> Iterator[str]:
        more = ""
        if self.rules.is_parallel and syntax.is_shared:
            more = f"({self.literal(syntax.separator + syntax.before_name)} call{number})*"
        yield f"section{number}: {begin} call{number} {more} {self.literal(syntax.end)}"
        calls = (
            f"{self.literal(tool.name + syntax.before_arguments)} arguments{i} "
            f"{self.literal(syntax.after_arguments)}"
            for i, tool in enumerate(self.tools)
        )
        yield f"call{number}: {' | '.join(calls)}"

    def tags(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Return the body of a rule for the tool's parameters, in order, each in its own tags."""
        _allow_only(OBJECT_KEYS, schema, tool)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_readable = (
            isinstance(properties, Mapping)
            and isinstance(required, list)
            and all(isinstance(each, Mapping) for each in properties.values())
            and all(name in properties for name in required)
        )
        message = f"tool {tool.name!r}: properties must be schemas, and include all required names"
        if not is_readable:
            raise RequestError(message, param="tools")
        definitions = {key: schema[key] for key in DEFINITIONS & set(schema)}
        parameters = []
        for name, property_schema in properties.items():
            begin = self.literal(f"<parameter={name}>\n")
            value = self.tag_value(tool, name, property_schema, definitions)
            parameters.append(f"({begin} {value})" + ("" if name in required else "?"))
        return " ".join(parameters) or '""'

    def tag_value(self, tool: Tool, name: str, schema: Any, definitions: Mapping[str, Any]) -> str:
        types = tool.types(name)
        end = self.literal("\n</parameter>\n")
        if types and "string" not in types:
            return f"{self.json({**schema, **definitions})} {end}"
        _allow_only(STRING_KEYS, schema, tool)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(json.dumps(text) for text in texts)}) {end}"
        return 'untagged "\\n"'


def _allow_only(keys: set[str], schema: Any, tool: Tool) -> None:
    """Raise RequestError for schema keywords that cannot be enforced in tags."""
    options = [schema, *(each for each in listed(schema, "anyOf") if isinstance(each, Mapping))]
    for key in (key for each in options for key in each if key not in keys):
        message = (
            f"tool {tool.name!r}: {key!r} in the schema cannot be enforced, because this model "
            "writes arguments in tags"
        )
        raise RequestError(message, param="tools")
