"""Random JSON schemas: nested, with references, alternatives, formats, bounds and Unicode names."""

from __future__ import annotations

import random
from typing import Any

NAMES = [
    "name",
    "größe",
    "数量",
    "e-mail",
    "a b",
    'quo"te',
    "back\\slash",
    "emoji😀",
    "id",
    "x/y",
    "~",
]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"]
FORMATS += ["uri", "uri-reference", "json-pointer", "regex", "idn-email", "iri"]
PATTERNS = ["^[a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "x", "^[^aeiou\\s]+$", "^\\S{1,6}$"]
PATTERNS += ["^[äöü]{1,3}$", "^a.c$", "[0-9]$", "^\\w+@\\w+$"]
# Schemas with keywords that a grammar cannot express directly.
CONDITIONS: list[dict[str, Any]] = [
    {"not": {"type": ["string", "null"]}},
    {"type": "string", "not": {"enum": ["", "a", "né", "\n]"]}, "maxLength": 5},
    {"type": ["string", "integer"], "if": {"type": "string"}, "then": {"minLength": 2}},
    {"enum": ["ab", "abc", 1, True], "not": {"anyOf": [{"const": "ab"}, {"type": "boolean"}]}},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
        "else": {"not": {"required": ["x"]}},
    },
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"not": {"required": ["b", "c"]}}}},
    {"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2},
    {"type": "object", "propertyNames": {"enum": ["a b", "c.d"]}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    {"oneOf": [{"type": "string"}, {"enum": ["auto", 7]}]},
    {"type": "string", "format": "color"},
]
# Schemas that cannot be enforced; only a few random schemas contain one.
REFUSED: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"not": {"pattern": "a"}},
    {"if": {"multipleOf": 2}, "then": {"maximum": 2}},
    {"type": "object", "propertyNames": {"format": "date"}},
    {"type": "array", "contains": {"type": "null"}},
    {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
    {"type": "number", "multipleOf": 0.01},
    {"type": "string", "pattern": "^(?=a)"},
    {"$ref": "https://example.com/other.json"},
    {"type": "integer", "minimum": 5, "maximum": 4},
]


def random_schema(seed: int, has_conditions: bool = True) -> dict[str, Any]:
    """Return a random schema; about one in ten contains a part that must be rejected."""
    rng = random.Random(seed)
    names = ["node", "Größe", "x~y"]
    schema = _object(rng, 3)
    schema["$defs"] = {name: _any(rng, 1) for name in names}
    schema["$defs"]["list"] = {
        "type": "object",
        "properties": {"value": _scalar(rng), "next": {"$ref": "#/$defs/list"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        schema["properties"]["odd"] = rng.choice(REFUSED)
        schema.setdefault("required", []).append("odd")
    if has_conditions and rng.random() < 0.3:
        schema["properties"]["condition"] = rng.choice(CONDITIONS)
    if rng.random() < 0.5:
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.35:
        return _scalar(rng)
    return rng.choice([_object, _array, _alternatives, _reference, _both])(rng, depth - 1)


def _scalar(rng: random.Random) -> dict[str, Any]:
    return rng.choice([_text, _number, _integer, _constant])(rng)


def _text(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randrange(4)
    return {"type": ["string", "null"], "minLength": low, "maxLength": low + rng.randrange(9)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), rng.randrange(4))
    low_key = rng.choice(["minimum", "exclusiveMinimum"])
    high_key = rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": "number", low_key: low, high_key: low + rng.choice([1, 0.5, 1000])}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "exclusiveMaximum": low + rng.randrange(8, 500)}
    return schema | ({"multipleOf": rng.choice([2, 3, 7])} if rng.random() < 0.3 else {})


def _constant(rng: random.Random) -> dict[str, Any]:
    values = [1, -2.5, "ja", "nein 😀", None, True, [1, "a"], {"k": [None]}, 'a"b\\c\n', "\t"]
    if rng.random() < 0.4:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rng.choice([False, False, _scalar(rng)]),
    }
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^x-": _scalar(rng)}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth), "maxItems": 3}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_scalar(rng), _scalar(rng)]
    return schema | {"minItems": rng.randrange(3)}


def _alternatives(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"anyOf": [_any(rng, depth), _any(rng, depth)]}
    kinds = rng.sample(["cat", "dog", "köder"], 2)
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "of": _any(rng, depth)},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for kind in kinds
    ]
    return {"oneOf": [*options, rng.choice([{"type": "integer"}, {"type": "null"}])]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/" + rng.choice(["node", "Gr%C3%B6%C3%9Fe", "x~0y", "list"])}


def _both(rng: random.Random, depth: int) -> dict[str, Any]:
    one, other = ({"type": "object", "properties": {name: _scalar(rng)}} for name in ("id", "name"))
    return {"allOf": [one, {**other, "required": ["name"]}]}
