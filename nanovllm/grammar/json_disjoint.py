"""Whether two rewritten JSON schemas have no value in common, as far as that is easily seen.

Then `oneOf` says the same as `anyOf`, which a grammar can express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

Schema = dict[str, Any] | bool
Parts = Mapping[str, Schema]  # what "#/$defs/NAME" refers to

MAX_DEPTH = 6
KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))


def are_disjoint(one: Schema, other: Schema, parts: Parts, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        return False
    ones, others = _demands(one, parts), _demands(other, parts)
    if not _kinds(ones, parts) & _kinds(others, parts):
        return True
    if not _values_meet(ones, others):
        return True
    if _kinds(ones, parts) & _kinds(others, parts) != {"object"}:
        return False
    names = {name for each in (*ones, *others) for name in each.get("required", ())}
    return any(
        are_disjoint(mine, yours, parts, depth + 1)
        for name in names
        for mine in _property(ones, name)
        for yours in _property(others, name)
    )


def kinds_of(types: Set[str], schema: Schema, parts: Parts) -> frozenset[str]:
    """Those of some types that values of a schema may have; whole numbers are numbers."""
    return _kinds([{"type": [*types]}, *_demands(schema, parts)], parts)


def _demands(schema: Schema, parts: Parts, depth: int = 0) -> list[dict[str, Any]]:
    """The schemas that a value must all satisfy; False is the one that none does."""
    if isinstance(schema, bool):
        return [] if schema else [{"type": []}]
    found = [schema]
    if depth < MAX_DEPTH:
        for each in schema.get("allOf", ()):
            found += _demands(each, parts, depth + 1)
        if "$ref" in schema:
            target = parts.get(schema["$ref"].rsplit("/", 1)[1], True)
            found += _demands(target, parts, depth + 1)
    return found


def _kinds(demands: list[dict[str, Any]], parts: Parts, depth: int = 0) -> frozenset[str]:
    kinds = KINDS
    for demand in demands:
        types = demand.get("type", [*KINDS])
        types = [types] if isinstance(types, str) else types
        kinds &= {"number" if each == "integer" else each for each in types}
        for key in ("anyOf", "oneOf"):
            if key in demand and depth < MAX_DEPTH:
                options = [_kinds(_demands(o, parts), parts, depth + 1) for o in demand[key]]
                kinds &= frozenset().union(*options)
        for values in _listed(demand):
            kinds &= {_kind(value) for value in values}
    return kinds


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {type(None): "null", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _listed(demand: dict[str, Any]) -> list[list[Any]]:
    """The lists of values, if any, that a demand limits itself to."""
    constant = [[demand["const"]]] if "const" in demand else []
    return [*constant, demand["enum"]] if "enum" in demand else constant


def _values_meet(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether lists of values, if both sides have one, share any; numbers may look different."""
    mine, yours = _common_values(ones), _common_values(others)
    return mine is None or yours is None or bool(mine & yours)


def _common_values(demands: list[dict[str, Any]]) -> frozenset[str] | None:
    lists = [frozenset(map(_spelled, values)) for each in demands for values in _listed(each)]
    return frozenset.intersection(*lists) if lists else None


def _spelled(value: Any) -> str:
    """The same for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_spelled, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_spelled(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def _property(demands: list[dict[str, Any]], name: str) -> list[Schema]:
    """What is demanded of a property; a name that patterns may match is left out."""
    found: list[Schema] = []
    for demand in demands:
        if name in demand.get("properties", {}):
            found.append(demand["properties"][name])
        elif "patternProperties" not in demand:
            found.append(demand.get("additionalProperties", True))
    return found
