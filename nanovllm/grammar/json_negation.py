"""The negation of a JSON schema, as a schema that says `not` nowhere.

A grammar cannot say what a text is not, but much of a negation can be put the other way round:
not to require a property is to forbid it, not to be "a" is to be one of all other strings. The
result may allow less than the negation does, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any] | bool

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
MAX_DEPTH = 4
MAX_WAYS = 16  # to break a schema
MAX_VALUES = 100  # of an enum
# What breaks a bound: the other bound, by so much, of a value of that type.
BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


@dataclass(frozen=True, slots=True)
class Negation:
    """Negates parts of one schema, in its own words; `rewrite` puts those of parts that stay."""

    find: Callable[[str], Any]  # what a reference means
    rewrite: Callable[[Any], Schema]
    draft: int  # up to 7 what stands beside a reference is ignored, before 6 there is no const

    def of(self, schema: Any, depth: int = 0) -> Schema | None:
        """Return what excludes every value of a schema, or None where that cannot be said."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        if "$ref" in schema and self.draft < 8:
            schema = {"$ref": schema["$ref"]}
        keys = sorted(schema, key=lambda key: key == "properties")  # the many ways come last
        ways = [way for key in keys for way in self._ways(key, schema[key], depth + 1)]
        return None if not ways else ways[0] if len(ways) == 1 else {"anyOf": ways[:MAX_WAYS]}

    def _ways(self, key: str, value: Any, depth: int) -> Iterator[Schema]:
        """The ways in which a value can break one keyword."""
        if key == "type":
            yield from _other_types([value] if isinstance(value, str) else value)
        elif key == "const" and self.draft >= 6:
            yield from _other_values([value])
        elif key == "not":
            yield self.rewrite(value)
        elif key == "$ref":
            yield from self._known([self.find(value)], depth)
        elif key in BOUNDS and isinstance(value, int):
            kind, other, step = BOUNDS[key]
            if value + step >= 0:
                yield {"type": kind, other: value + step}
        elif isinstance(value, list):
            yield from self._ways_of_list(key, value, depth)
        elif key == "properties" and isinstance(value, dict):
            for name, part in value.items():
                if negation := self.of(part, depth):
                    yield {**_object({name: negation}), "required": [name]}

    def _ways_of_list(self, key: str, values: list[Any], depth: int) -> Iterator[Schema]:
        if key == "enum":
            yield from _other_values(values)
        elif key == "required":
            yield from (_object({str(name): False}) for name in values)
        elif key == "allOf":
            yield from self._known(values, depth)
        elif key == "anyOf":
            parts = list(self._known(values, depth))
            if len(parts) == len(values):
                yield {"allOf": parts}

    def _known(self, schemas: list[Any], depth: int) -> Iterator[Schema]:
        return (each for s in schemas if (each := self.of(s, depth)) is not None)


def _object(properties: dict[str, Schema]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _other_types(types: Any) -> Iterator[Schema]:
    """Whole numbers are numbers, so that either excludes both."""
    if isinstance(types, list) and {*map(str, types)} <= TYPES:
        numbers = {"integer", "number"} if {"integer", "number"} & {*types} else set()
        if rest := TYPES - {*types} - numbers:
            yield {"type": sorted(rest)}


def _other_values(values: list[Any]) -> Iterator[Schema]:
    kinds = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    yield from _other_types([kinds.get(type(value), "number") for value in values])
    texts = [value for value in values if isinstance(value, str)]
    if texts and len(texts) <= MAX_VALUES:
        yield {"type": "string", "pattern": f"^(?:{other_texts(texts)})$"}
    if len(booleans := {value for value in values if isinstance(value, bool)}) == 1:
        yield {"const": not booleans.pop()}


def other_texts(texts: list[str]) -> str:
    """An expression for every text but these."""
    rests: dict[str, list[str]] = {}  # by first character
    for text in texts:
        rests.setdefault(_escaped(text[:1]), []).append(text[1:])
    ways = [] if rests.pop("", None) else [""]
    ways.append(f"[^{''.join(rests)}][\\s\\S]*" if rests else "[\\s\\S]+")
    ways += [f"{first}(?:{other_texts(following)})" for first, following in rests.items()]
    return "|".join(ways)


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if char.isascii() and char and not char.isalnum() else char
