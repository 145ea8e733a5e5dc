"""Keywords that ask something of one value: written as llguidance takes them, or refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from nanovllm.errors import GrammarError
from nanovllm.grammar.json_formats import NUMBER_FORMATS, STRING_FORMATS
from nanovllm.grammar.json_negation import TYPES

Schema = dict[str, Any] | bool

MAX_NAMES = 32  # of which at least one must come
EXACT = 2**53  # llguidance reads numbers as float64, which hold whole numbers up to here
DEPENDENT = ("dependencies", "dependentRequired", "dependentSchemas")
APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "not", *DEPENDENT))
ASKED_OF_TEXT = APPLICATORS | {"pattern", "enum", "const", "format", "minLength", "maxLength"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The pieces of a regular expression: escapes, sets, groups with a mark, other characters.
REGEX_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(\?(?:P?<?[=!]|P<|.)|.", re.DOTALL)
# Those that llguidance lacks or reads differently: what is no digit or letter, which Python takes
# from all of Unicode; sets of sets; borders, lookaround, flags and references.
DIFFERENT_PIECE = re.compile(
    r"\\[DWbBAZzGpPXRkhHQEcNKC1-9]|\[\^.*\\[dw]|\[.*(\\[DWbpP]|(?<!\\)\[|&&|--|~~)|\(\?(?!:|P<)",
    re.DOTALL,
)
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # in JSON only as \uXXXX


def refused(keyword: str, path: str, reason: str = "no mask can tell what it asks") -> GrammarError:
    return GrammarError(f"structured_outputs: {keyword!r} at {path} cannot be enforced: {reason}")


def check_pattern(keyword: str, pattern: Any, path: str) -> None:
    if not isinstance(pattern, str):
        raise refused(keyword, path, "it must be a string")
    for piece in REGEX_PIECE.findall(pattern):
        if DIFFERENT_PIECE.match(piece):
            raise refused(keyword, path, f"{piece!r:.40} is not supported in {pattern!r:.80}")


def types_of(schema: dict[str, Any], path: str) -> frozenset[str]:
    types = schema.get("type", sorted(TYPES))
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
        raise refused("type", path, f"{types!r:.40} are no types")
    if unknown := {*types} - TYPES:
        raise refused("type", path, f"{min(unknown)!r} is no type")
    return frozenset(types)


def add_part(out: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a demand to others that may have the same keyword."""
    if out.keys() & part.keys():
        out["allOf"] = [*out.get("allOf", ()), part]
    else:
        out.update(part)


def demand(out: dict[str, Any], part: Schema) -> None:
    """Add a demand whose keywords the schema itself may have too."""
    out["allOf"] = [*out.get("allOf", ()), part]


def name_pattern(schema: Any) -> str | None:
    """What propertyNames asks for as a pattern, if it is one; it is empty if that is nothing."""
    if isinstance(schema, bool) or not isinstance(schema, dict):
        return "" if schema is True else None
    asked = {key: value for key, value in schema.items() if key in ASKED_OF_TEXT}
    if schema.get("type", "string") != "string":
        return None
    if asked.keys() <= {"minLength", "maxLength"}:
        low, high = asked.get("minLength", 0), asked.get("maxLength", "")
        return f"^[\\s\\S]{{{low},{high}}}$" if asked else ""
    if asked.keys() == {"pattern"} and isinstance(pattern := asked["pattern"], str):
        return pattern
    if asked.keys() == {"enum"} and isinstance(asked["enum"], list):
        return f"^(?:{'|'.join(re.escape(str(name)) for name in asked['enum'])})$"
    return None


def add_count(out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
    key = path.rsplit("/", 1)[1]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise refused(key, path, "it must be a whole number")
    if key in ("minProperties", "maxProperties"):
        _count_properties(out, int(value), schema, path)
    else:
        out[key] = int(value)


def _count_properties(out: dict[str, Any], value: int, schema: dict[str, Any], path: str) -> None:
    """Counts are enforced by llguidance where all properties that are listed are required."""
    key = path.rsplit("/", 1)[1]
    listed, required = schema.get("properties"), schema.get("required")
    needed = {*map(str, required)} if isinstance(required, list) else set()
    optional = [name for name in listed if name not in needed] if isinstance(listed, dict) else []
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if key == "minProperties" and value <= len(needed):
        return
    if key == "minProperties" and value > 1:
        raise refused(key, path, "names may come twice")
    if not optional:
        out[key] = value
    elif key == "minProperties":
        if len(optional) > MAX_NAMES:
            raise refused(key, path, "there are too many properties, none of them required")
        ways: list[Schema] = [{"required": [name]} for name in optional]
        others = {"properties": dict.fromkeys(optional, False), "minProperties": 1}
        demand(out, {"anyOf": ways if is_closed else [*ways, others]})
    elif not is_closed or value < len({*needed, *optional}):
        raise refused(key, path, "some properties are not required")


def add_required(out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused("required", path, "it must be a list of names")
    if any(map(UNWRITABLE.search, value)):
        raise refused("required", path, "a name has control characters")
    out["required"] = value


def add_constant(out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
    key = path.rsplit("/", 1)[1]
    if key == "enum" and (not isinstance(value, list) or not value):
        raise refused(key, path, "it must be a list of values")
    for leaf in _leaves(value):
        if isinstance(leaf, str) and UNWRITABLE.search(leaf):
            raise refused(key, path, f"{leaf!r:.40} has control characters")
        if isinstance(leaf, int | float) and abs(leaf) > EXACT:
            raise refused(key, path, f"{leaf} is too large a number")
    add_part(out, {key: value})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def add_pattern(out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
    check_pattern("pattern", value, path)
    add_part(out, {"pattern": value})


def add_numbers(
    out: dict[str, Any], schema: dict[str, Any], types: frozenset[str], path: str
) -> None:
    """Bounds and multiples. A float that is written with many digits may be read as its bound, so
    those that a number must not reach move by a little."""
    if not {"number", "integer"} & types:
        return
    for key in (*BOUNDS, "multipleOf"):
        value = schema.get(key, False)
        is_number = isinstance(value, int | float)
        if not is_number or abs(value) > EXACT:
            raise refused(key, path, f"{value!r:.40} is no number up to 2**53")
    for low, sign in (("minimum", 1), ("maximum", -1)):
        strict = "exclusive" + low.capitalize()
        bound, limit = schema.get(low), schema.get(strict)
        if isinstance(limit, bool):  # as draft 4 has it
            bound, limit = (None, bound) if limit else (bound, None)
        if limit is not None and "number" in types:
            moved = float(f"{limit + sign * max(abs(limit), 1) * 1e-9:.12g}")
            bound, limit = moved if bound is None else sign * max(sign * bound, sign * moved), None
        out.update({key: v for key, v in ((low, bound), (strict, limit)) if v is not None})
    if "multipleOf" in schema:
        _multiple(out, schema["multipleOf"], path)
    if "number" in types:
        _add_shorter(out)


def _add_shorter(out: dict[str, Any]) -> None:
    """llguidance leaves out what has some of the digits of a bound, as 0.9 has of 0.99."""
    low, high = out.get("minimum", -math.inf), out.get("maximum", math.inf)
    shorter = {*_shorter(high), *_shorter(-low, "-")}
    values = [v for v in sorted(shorter) if low <= v <= high and not v % out.get("multipleOf", v)]
    if values:
        bounds = {key: out.pop(key) for key in ("minimum", "maximum") if key in out}
        add_part(out, {"anyOf": [bounds, {"enum": values}]})


def _shorter(bound: float, sign: str = "") -> Iterator[float]:
    """Fractions with less and less of the digits of a bound that is above 0."""
    if 0 < bound < math.inf:
        whole, _, digits = f"{Decimal(str(bound)):f}".partition(".")
        for length in range(1, len(digits)):
            if digits[length - 1] != "0":
                yield float(f"{sign}{whole}.{digits[:length]}")


def check_spans(out: dict[str, Any], types: frozenset[str], path: str) -> None:
    for low in ("minimum", "minLength", "minItems", "minProperties"):
        high = low.replace("min", "max")
        if len(types) == 1 and low in out and high in out and out[low] > out[high]:
            raise refused(low, path, f"it is above {high}")


def _multiple(out: dict[str, Any], value: float, path: str) -> None:
    """Python's check divides floats, which is exact for whole numbers, halves, quarters..."""
    if value <= 0 or value * 1024 != int(value * 1024):
        raise refused("multipleOf", path, f"floats are no exact multiples of {value}")
    out["multipleOf"] = int(value) if value == int(value) else value


def add_format(
    out: dict[str, Any], schema: dict[str, Any], types: frozenset[str], path: str
) -> None:
    """Formats are patterns that allow less than they could; those of no standard say nothing."""
    name = schema.get("format")
    if name is None or not types & {"string", "number", "integer"}:
        return
    if isinstance(name, str) and name in NUMBER_FORMATS and "string" not in types:
        add_part(out, {"allOf": [NUMBER_FORMATS[name]]})
    elif isinstance(name, str) and name in STRING_FORMATS:
        add_part(out, {"pattern": f"^(?:{STRING_FORMATS[name]})$"})
    elif not isinstance(name, str):
        raise refused("format", path, "it must be a string")
