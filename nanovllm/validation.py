"""Validate options and requests; every error names the invalid parameter."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from nanovllm.errors import ConfigError, NanovllmError, RequestError

T = TypeVar("T")

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def require(
    is_valid: object,
    param: str,
    expected: str,
    value: object,
    kind: type[NanovllmError] = RequestError,
) -> None:
    """Raise an error of type `kind` about `param` unless `is_valid`."""
    if not is_valid:
        raise kind(f"{param} must be {expected}, got {value!r:.80}", param=param)


def require_text(param: str, value: object) -> None:
    """Raise RequestError unless the value is a string that can be encoded as UTF-8."""
    require(isinstance(value, str), param, "a string", value)
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        message = f"{param} must be valid Unicode ({error}); clean it first"
        raise RequestError(message, param=param) from error


def check_types(record: Any) -> None:
    """Raise ConfigError for the first field whose value does not match its simple type annotation.

    Numpy scalars are replaced with Python numbers, even in a frozen dataclass.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is field.default:  # fast path: nearly all fields have their default
            continue
        expected = _TYPES.get(str(field.type), ())
        if type(value) in expected:
            continue
        value = as_python(value)
        object.__setattr__(record, field.name, value)
        is_simple = isinstance(value, expected) and isinstance(value, bool) == (bool in expected)
        if expected and not is_simple:
            message = f"{field.name} must be of type {field.type}, got {value!r}"
            raise ConfigError(message, param=field.name)


def suggest_fields(record: type[T]) -> type[T]:
    """Make a dataclass suggest the closest field name for an unknown keyword argument."""
    made: Any = record
    init, known = made.__init__, frozenset(made.__dataclass_fields__)

    @functools.wraps(init)
    def checked(self: T, *values: Any, **named: Any) -> None:
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise TypeError(
                f"{made.__name__} got an unexpected keyword argument {unknown!r}"
                + suggestion(unknown, known)
            )
        init(self, *values, **named)

    made.__init__ = checked
    return record


def option(default: T, help: str, hash: bool | None = None, **details: Any) -> T:
    """Create a dataclass field with `help` for the command line and docs/reference.md.

    `details` may include `alias` (another flag), `unset` (what None or () means), `parse` (a
    function that parses the flag's text) and `env` (an environment variable with the default).
    """
    made: Any = dataclasses.field(default=default, hash=hash, metadata={"help": help, **details})
    return cast(T, made)


def check_choices(record: Any) -> None:
    """Raise ConfigError for the first field whose value is not in its Literal annotation."""
    for name, hint in get_type_hints(type(record)).items():
        value, choices = getattr(record, name), choices_of(hint)
        is_none = value is None and type(None) in get_args(hint)
        if choices and value not in choices and not is_none:
            message = f"{name} must be one of {', '.join(choices)}, got {value!r}"
            raise ConfigError(message, param=name)


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal, which may be part of a union; () for other types."""
    literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
    return get_args(literals[0]) if literals else ()


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a "did you mean" suffix with the most similar known name, or an empty string."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if name.startswith("guided_") and "structured_outputs" in names:  # vLLM's older names
        close = ["structured_outputs"]
    return f"; did you mean {close[0]}?" if close else ""


def as_python(value: Any) -> Any:
    """Convert a scalar of numpy or torch to a Python number; return other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def has_folder(name: str) -> bool:
    """Return whether a package exists; a folder with nothing but cached bytecode does not count."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # the package that contains it is missing
        return False
    return spec is not None and spec.origin is not None
