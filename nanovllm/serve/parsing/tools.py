"""The tools of a request, and conversion of arguments to JSON according to a tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.validation import require

Schema = Mapping[str, Any]

NAME = re.compile(r"[\w.:/-]{1,128}")
MAX_DEPTH = 16  # maximum nesting of schemas, including references
JSON_TYPES: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Schema
    is_strict: bool = False

    def types(self, parameter: str) -> frozenset[str]:
        """Return the JSON types that the schema allows for a parameter; empty if unspecified."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, self.parameters, set()))


def read_tools(entries: Sequence[Any]) -> list[Tool]:
    """Parse the `tools` of a request in the format of OpenAI's API."""
    tools: dict[str, Tool] = {}
    for i, entry in enumerate(entries):
        tool = _read_tool(entry, f"tools[{i}]")
        require(tool.name not in tools, f"tools[{i}]", "a tool with a unique name", tool.name)
        tools[tool.name] = tool
    return list(tools.values())


def is_tool(entry: Any) -> bool:
    try:
        read_tools([entry])
    except RequestError:
        return False
    return True


def as_json(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON: as a non-string value if `types` allows it, else as a string."""
    stripped = text.strip()
    value = PYTHON_CONSTANTS.get(stripped, stripped)
    parsed = json.loads(value) if is_json(value) else ""
    fitting = types.intersection(JSON_TYPES[type(parsed)]) - {"string"}
    return value if fitting else json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return False
    return True


def is_object(text: str) -> bool:
    return is_json(text) and isinstance(json.loads(text), dict)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _read_tool(entry: Any, param: str) -> Tool:
    function: Any = entry.get("function") if isinstance(entry, Mapping) else None
    is_function = isinstance(function, Mapping) and entry.get("type", "function") == "function"
    require(is_function, param, '{"type": "function", "function": {...}}', entry)
    name, parameters = function.get("name"), function.get("parameters")
    is_name = isinstance(name, str) and NAME.fullmatch(name)
    require(is_name, f"{param}.function.name", "up to 128 letters, digits or _-.:/", name)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    is_schema = isinstance(parameters, Mapping)
    require(is_schema, f"{param}.function.parameters", "a JSON schema", parameters)
    return Tool(name, parameters, function.get("strict") is True)


def _types(schema: Any, root: Schema, followed: set[str], depth: int = 0) -> Iterator[str]:
    """Yield a schema's types; follow each reference only once, because schemas can be recursive."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    yield from [schema["type"]] if isinstance(schema.get("type"), str) else listed(schema, "type")
    if "type" not in schema:
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        yield from (JSON_TYPES[type(value)][0] for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in listed(schema, keyword):
            yield from _types(option, root, followed, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        target: Any = root
        for step in reference.removeprefix("#").split("/")[1:]:
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types(target, root, followed, depth + 1)


def listed(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
