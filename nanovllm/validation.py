"""Check the fields of an options record against their annotations."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanovllm.errors import ConfigError

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def check_types(record: Any) -> None:
    """Raise ConfigError for the first field whose value is not of its annotated, simple type.

    Numpy's numbers in a frozen record become Python's, which they equal.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is field.default:  # as nearly all are, of many requests
            continue
        expected = _TYPES.get(str(field.type), ())
        if type(value) in expected:
            continue
        value = as_python(value)
        object.__setattr__(record, field.name, value)
        is_simple = isinstance(value, expected) and is_bool(value) == (bool in expected)
        if expected and not is_simple:
            raise ConfigError(f"{field.name} must be of type {field.type}, got {value!r}")


def as_python(value: Any) -> Any:
    """Python's own number for a scalar of numpy or torch; anything else stays as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_bool(value: object) -> bool:
    return isinstance(value, bool)  # which is an int to isinstance
