"""The negation of a JSON schema, as a schema that says `not` nowhere.

A grammar cannot say what a text is not, but much of a negation can be put the other way round:
not to require a property is to forbid it, not to be "a" is to be one of all other strings. The
result may allow less than the negation does, never more: `lost` tells of which types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from nanovllm.grammar.json_formats import NUMBER_FORMATS, STRING_FORMATS

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
NUMBER_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
NONE: frozenset[str] = frozenset()
STRINGS, ARRAYS, OBJECTS = (frozenset((kind,)) for kind in ("string", "array", "object"))
NUMBERS = frozenset(("integer", "number"))
FORMATTED = {**dict.fromkeys(STRING_FORMATS, STRINGS), **dict.fromkeys(NUMBER_FORMATS, NUMBERS)}
# Keywords that can be broken in ways that are not said, with the types that they speak of.
UNSAID = {
    "pattern": STRINGS,
    "multipleOf": NUMBERS,
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "contains"), ARRAYS),
    **dict.fromkeys(("uniqueItems", "unevaluatedItems"), ARRAYS),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames"), OBJECTS),
    **dict.fromkeys(("minProperties", "maxProperties", "unevaluatedProperties"), OBJECTS),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), OBJECTS),
    **dict.fromkeys(("oneOf", "if", "$dynamicRef", "$recursiveRef"), TYPES),
}


@dataclass(frozen=True, slots=True)
class Negation:
    """Negates parts of one schema, in its own words; `rewrite` puts those of parts that stay."""

    find: Callable[[str], Any]  # what a reference means
    rewrite: Callable[[Any], Schema]
    draft: int  # up to 7 what stands beside a reference is ignored, before 6 there is no const
    names: Collection[str] = ()  # of properties that are known from elsewhere

    def of(self, schema: Any, depth: int = 0) -> Schema | None:
        """Return what excludes every value of a schema, or None where that cannot be said."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        ways = self._some_ways(self._counted(schema), depth + 1)
        return None if not ways else ways[0] if len(ways) == 1 else {"anyOf": ways[:MAX_WAYS]}

    def lost(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types of values some of which fit neither a schema nor what `of` makes of it."""
        if isinstance(schema, bool):
            return NONE
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return TYPES
        schema = self._counted(schema)
        if len(self._some_ways(schema, depth + 1)) > MAX_WAYS:
            return TYPES
        types = schema.get("type", sorted(TYPES))
        types = {types} if isinstance(types, str) else {*map(str, types)}
        floats = {"number"} if types & NUMBERS == {"integer"} else NONE
        types |= {"integer"} if "number" in types else NONE
        found = [self._lost(key, value, depth + 1) for key, value in schema.items()]
        return NONE.union(*found) & types | floats

    def _counted(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords that count."""
        return {"$ref": schema["$ref"]} if "$ref" in schema and self.draft < 8 else schema

    def _some_ways(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        """As many of the ways to break a schema as count, and one more if there are more."""
        keys = sorted(schema, key=lambda key: key == "properties")  # the many ways come last
        ways = (way for key in keys for way in self._ways(key, schema[key], depth))
        return [*islice(chain(ways, self._ways_of_rest(schema, depth)), MAX_WAYS + 1)]

    def _ways_of_rest(self, schema: dict[str, Any], depth: int) -> Iterator[Schema]:
        """Some of the ways to break what properties and items beside those that are listed obey."""
        listed = schema.get("properties", {})
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            others = (name for name in self.names if name not in listed)
            yield from ({"type": "object", "required": [name]} for name in others)
        if isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
            for first in self._known([schema["items"]], depth):
                yield {"type": "array", "prefixItems": [first], "minItems": 1}

    def _ways(self, key: str, value: Any, depth: int) -> Iterator[Schema]:
        """The ways in which a value can break one keyword."""
        if key == "type":
            yield from _other_types([value] if isinstance(value, str) else value)
        elif key == "const" and self.draft >= 6:
            yield from self._ways_of_list("enum", [value], depth)
        elif key == "not":
            yield self.rewrite(value)
        elif key == "$ref":
            yield from self._known([self.find(value)], depth)
        elif key in BOUNDS and isinstance(value, int):
            kind, other, step = BOUNDS[key]
            if value + step >= 0:
                yield {"type": kind, other: value + step}
        elif key in NUMBER_BOUNDS and self.draft >= 6 and not isinstance(value, bool):
            yield self.rewrite({"type": "number", NUMBER_BOUNDS[key]: value})
        elif isinstance(value, list):
            yield from self._ways_of_list(key, value, depth)
        elif key == "properties" and isinstance(value, dict):
            for name, part in value.items():
                if negation := self.of(part, depth):
                    yield {**_object({name: negation}), "required": [name]}

    def _ways_of_list(self, key: str, values: list[Any], depth: int) -> Iterator[Schema]:
        if key == "enum":
            yield from _other_values(values)
            if numbers := _other_numbers(values):
                yield {"anyOf": [self.rewrite(each) for each in numbers]}
        elif key == "required":
            yield from (_object({str(name): False}) for name in values)
        elif key == "allOf":
            yield from self._known(values, depth)
        elif key == "anyOf":
            parts = list(self._known(values, depth))
            if len(parts) == len(values):
                yield {"allOf": parts}

    def _lost(self, key: str, value: Any, depth: int) -> frozenset[str]:
        """The types of values that may break one keyword in a way that is not said."""
        if key == "$ref":
            return self.lost(self.find(value), depth)
        if key in ("allOf", "anyOf") and isinstance(value, list):
            return NONE.union(*(self.lost(each, depth) for each in value))
        if key == "properties" and isinstance(value, dict):
            return OBJECTS if any(self.lost(part, depth) for part in value.values()) else NONE
        if key == "const" or (key == "enum" and isinstance(value, list)):
            return _lost_values([value] if key == "const" else value)
        if key == "format" and isinstance(value, str):
            return FORMATTED.get(value, NONE)
        if key in NUMBER_BOUNDS:
            return NONE if self.draft >= 6 else NUMBERS
        return NONE if _is_harmless(key, value) else UNSAID.get(key, NONE)

    def _known(self, schemas: list[Any], depth: int) -> Iterator[Schema]:
        return (each for s in schemas if (each := self.of(s, depth)) is not None)


def _is_harmless(key: str, value: Any) -> bool:
    """Whether every value obeys a keyword that can be broken in ways that are not said."""
    if key in ("uniqueItems", "minProperties"):
        return value is False or (key == "minProperties" and value == 0)
    return key not in ("contains", "if") and (value is True or value == {})


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


def _other_numbers(values: list[Any]) -> list[Schema]:
    """What is below, between and above numbers."""
    numbers = sorted({value for value in values if type(value) in (int, float)})
    if not 0 < len(numbers) <= MAX_WAYS:
        return []
    lows = [{}, *({"exclusiveMinimum": number} for number in numbers)]
    highs = [*({"exclusiveMaximum": number} for number in numbers), {}]
    return [{"type": "number", **low, **high} for low, high in zip(lows, highs, strict=True)]


def _lost_values(values: list[Any]) -> frozenset[str]:
    """The types of values too many, or too large, to say what others there are."""
    limits = ((str, MAX_VALUES, STRINGS), (list, 0, ARRAYS), (dict, 0, OBJECTS))
    lost = [types for kind, most, types in limits if _count(values, kind) > most]
    return NONE.union(*lost, NUMBERS if _count(values, int, float) > MAX_WAYS else NONE)


def _count(values: list[Any], *kinds: type) -> int:
    return sum(type(value) in kinds for value in values)


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
