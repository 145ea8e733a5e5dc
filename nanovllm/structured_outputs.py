"""The shape of `structured_outputs`: what an answer must be, and from where on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
BEFORE = ("after", "opened_by")  # what may come before an answer
EXPECTED = {
    "json": "a JSON schema: a dictionary, true or false, or one of them as text",
    "regex": "a non-empty string",
    "choice": "a list of at least one string, none empty",
    "grammar": "a Lark grammar: a non-empty string",
    "json_object": "True",
    "after": "a non-empty string",
    "opened_by": "a non-empty string",
}


def as_structured(value: object) -> dict[str, Any] | None:
    """Check the shape, and detach it from what the caller holds."""
    if value is None:
        return None
    kinds = [key for key in value if key in KINDS] if isinstance(value, Mapping) else []
    if not isinstance(value, Mapping) or len(kinds) != 1 or not {*value} <= {*kinds, *BEFORE}:
        raise ConfigError(
            f"structured_outputs must be a dictionary with one of {', '.join(KINDS)}, and 'after' "
            f"and 'opened_by' if they are wanted, got {value!r:.80}"
        )
    if "opened_by" in value and "after" not in value:
        raise ConfigError("structured_outputs['opened_by'] needs 'after', which ends what it opens")
    return {key: _checked(key, item) for key, item in value.items()}


def _checked(key: str, value: Any) -> Any:
    try:
        if key == "json":
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            value = json.loads(text)
        elif key == "choice" and not isinstance(value, str):
            value = list(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs[{key!r}]: {error}") from error
    is_valid = {
        "json": isinstance(value, dict | bool),
        "choice": isinstance(value, list) and bool(value) and all(map(_is_text, value)),
        "json_object": value is True,
    }.get(key, _is_text(value))
    if not is_valid:
        raise ConfigError(f"structured_outputs[{key!r}] must be {EXPECTED[key]}, got {value!r:.80}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
