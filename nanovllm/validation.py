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
    """Raise ConfigError for the first field whose value is not of its annotated, simple type."""
    for field in dataclasses.fields(record):
        expected = _TYPES.get(str(field.type))
        value = getattr(record, field.name)
        if expected is None or (
            isinstance(value, expected) and is_bool(value) == (bool in expected)
        ):
            continue
        raise ConfigError(f"{field.name} must be of type {field.type}, got {value!r}")


def unwrap_numbers(record: Any) -> None:
    """Replace numpy's numbers in a frozen record by Python's, which they equal."""
    for field in dataclasses.fields(record):
        object.__setattr__(record, field.name, as_python(getattr(record, field.name)))


def as_python(value: Any) -> Any:
    """Python's own number for a scalar of numpy or torch; anything else stays as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_bool(value: object) -> bool:
    return isinstance(value, bool)  # which is an int to isinstance
