"""The tool kinds of the Responses API: the model sees functions, clients see their own items.

| kind | the model sees | a call of it is |
|---|---|---|
| function | the function | function_call |
| function of namespace N | a function N__name | function_call with the namespace |
| custom | a function with one string, `input` | custom_tool_call |
| tool_search, on the client | a function tool_search | tool_search_call |
| others: hosted tools | nothing | |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.serve.fields import NOT_HOSTED, log_ignored
from nanovllm.serve.parsing.tools import is_object
from nanovllm.serve.protocol import nested

Item = dict[str, Any]

ONE_STRING = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# Kind -> prefix of an item's id, and its initial fields.
ITEMS: dict[str, tuple[str, Item]] = {
    "function": ("fc_", {"type": "function_call", "arguments": ""}),
    "custom": ("ctc_", {"type": "custom_tool_call", "input": ""}),
    "tool_search": ("tsc_", {"type": "tool_search_call", "execution": "client", "arguments": {}}),
}
SEARCH = "tool_search"


@dataclass(frozen=True, slots=True)
class ResponseTool:
    kind: str  # a key of ITEMS
    name: str
    namespace: str | None
    function: Item  # the tool in the format of the chat API, with the name that the model sees
    is_deferred: bool = False  # not in the list of tools that the model sees

    @property
    def flat_name(self) -> str:
        return flat_name(self.name, self.namespace)

    def start(self, call_id: str) -> tuple[str, Item]:
        """Return the prefix of the id of a call's item, and the item's other fields."""
        prefix, fields = ITEMS[self.kind]
        name = {} if self.kind == SEARCH else {"name": self.name}
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return prefix, {**fields, "call_id": call_id, **name, **namespace}

    def finish(self, arguments: str) -> Item:
        """Return the last fields of a call's item, given the arguments that the model wrote."""
        if self.kind == "function":
            return {"arguments": arguments}
        value = json.loads(arguments) if is_object(arguments) else {}
        if self.kind == SEARCH:
            return {"arguments": value}
        text = value.get("input", arguments)
        return {"input": text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)}


def read_tools(entries: Sequence[Any], namespace: str | None = None) -> Iterator[ResponseTool]:
    """Yield the tools that the model may call; malformed ones are detected later."""
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        kind = kind if isinstance(kind, str) else "function"
        if kind == "namespace" and namespace is None and isinstance(entry.get("tools"), list):
            yield from read_tools(entry["tools"], str(entry.get("name")))
        elif kind in ITEMS and (kind != SEARCH or entry.get("execution") == "client"):
            yield _read_tool(kind, entry, namespace)
        else:
            log_ignored(logging.INFO, "/v1/responses", f"tools of type {kind!r:.60}", NOT_HOSTED)


def flat_name(name: str, namespace: Any) -> str:
    """Return the name that the model sees."""
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def _read_tool(kind: str, entry: Any, namespace: str | None) -> ResponseTool:
    if not isinstance(entry, Mapping):
        return ResponseTool(kind, "", None, entry)
    name = SEARCH if kind == SEARCH else entry.get("name")
    fields = {each: entry.get(each) for each in ("description", "parameters", "strict")}
    if kind == "custom":
        fields = {"description": _description(entry, entry.get("format")), "parameters": ONE_STRING}
    fields["name"] = flat_name(name, namespace) if isinstance(name, str) else name
    function = nested({"type": "function", **fields}, "function")
    is_deferred = entry.get("defer_loading") is True
    return ResponseTool(kind, str(name), namespace, function, is_deferred)


def _description(entry: Mapping[str, Any], form: Any) -> str:
    """Return a custom tool's description with its grammar, which is not enforced."""
    parts = [entry.get("description")]
    if isinstance(form, Mapping) and form.get("definition"):
        parts.append(
            f"The input must match this {form.get('syntax')} grammar:\n{form['definition']}"
        )
    return "\n".join(str(part) for part in parts if part)
