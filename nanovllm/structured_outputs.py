"""Validate `SamplingParams.structured_outputs`, the constraint on a request's output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.validation import require

STRUCTURED = "structured_outputs"
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object")
REASONING_KEYS = ("after", "opened_by")  # end and start markers of reasoning before the output
EXPECTED = {
    "json": "a JSON schema: a dictionary, true or false, or one of them as text",
    "regex": "a non-empty string",
    "choice": "a non-empty list of non-empty strings",
    "grammar": "a Lark grammar: a non-empty string",
    "json_object": "True",
    "after": "a non-empty string",
    "opened_by": "a non-empty string",
}


def check_structured(value: object) -> dict[str, Any]:
    """Validate `structured_outputs`; return a copy, unaffected by later changes to `value`."""
    fields = value if isinstance(value, Mapping) else {}
    kinds = [key for key in fields if key in GRAMMAR_KINDS]
    expected = (
        f"a dict with one of {', '.join(GRAMMAR_KINDS)}, and optionally 'after' and 'opened_by'"
    )
    is_valid = len(kinds) == 1 and {*fields} <= {*kinds, *REASONING_KEYS}
    require(is_valid, STRUCTURED, expected, value, ConfigError)
    has_end = "opened_by" not in fields or "after" in fields
    require(has_end, STRUCTURED, "a dict with 'after' if it has 'opened_by'", value, ConfigError)
    return {key: _checked_grammar(key, item) for key, item in fields.items()}


def _checked_grammar(key: str, value: Any) -> Any:
    try:
        if key == "json":
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            value = json.loads(text)
        elif key == "choice" and not isinstance(value, str):
            value = list(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{STRUCTURED}[{key!r}]: {error}", param=STRUCTURED) from error
    is_valid = {
        "json": isinstance(value, dict | bool),
        "choice": isinstance(value, list) and value and all(map(_is_text, value)),
        "json_object": value is True,
    }.get(key, _is_text(value))
    require(is_valid, STRUCTURED, f"a dict whose {key!r} is {EXPECTED[key]}", value, ConfigError)
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
