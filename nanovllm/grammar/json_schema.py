"""JSON schemas as llguidance enforces them whole, to the letter of Python's `jsonschema`.

Each part of a schema is written anew with the keywords that llguidance gets right. What it would
ignore, or read differently, is refused by name; where it allows too much, the part is narrowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urljoin

from nanovllm.errors import GrammarError
from nanovllm.grammar.json_disjoint import are_disjoint, kinds_of
from nanovllm.grammar.json_keywords import (
    APPLICATORS,
    DEPENDENT,
    UNWRITABLE,
    add_constant,
    add_count,
    add_format,
    add_numbers,
    add_part,
    add_pattern,
    add_required,
    check_pattern,
    check_spans,
    demand,
    name_pattern,
    refused,
    types_of,
)
from nanovllm.grammar.json_negation import TYPES, Negation

Schema = dict[str, Any] | bool

MAX_OPTIONS = 64  # of oneOf, each of which is compared with every other
MAX_LISTS = 256  # of different values, each of which is spelt out
NOTES = ("title", "description", "default", "examples", "$comment")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# What no token mask can tell, with the types that it speaks of, and values that ask for nothing.
REFUSED: dict[str, tuple[frozenset[str], tuple[Any, ...]]] = {
    "contains": (frozenset(("array",)), ()),
    "unevaluatedItems": (frozenset(("array",)), (True, {})),
    "$dynamicRef": (TYPES, ()),
    "$recursiveRef": (TYPES, ()),
    "disallow": (TYPES, ()),
    "extends": (TYPES, ()),
    "divisibleBy": (TYPES, ()),
}


def enforceable(schema: Schema) -> dict[str, Any]:
    """Return a schema that allows nothing but what the given one does, or raise GrammarError."""
    try:
        return _Rewriter(schema).rewrite()
    except RecursionError as error:
        raise GrammarError("structured_outputs: the JSON schema is nested too deeply") from error


@dataclass(slots=True)
class _Rewriter:
    root: Schema
    draft: int = field(init=False)
    pointers: list[str] = field(default_factory=list)  # to the parts that are referred to
    names: dict[str, str] = field(default_factory=dict)  # by pointer
    parts: dict[str, Schema] = field(default_factory=dict)  # by name, rewritten
    # Of the options of each oneOf, by the id of their list, with the types that they lose.
    negations: dict[int, list[tuple[Schema | None, frozenset[str]]]] = field(default_factory=dict)

    def rewrite(self) -> dict[str, Any]:
        self.draft = _draft(self.root)
        first = self._name("")
        for pointer in self.pointers:  # which grow meanwhile
            self.parts[self.names[pointer]] = self._part(self._find(pointer), "#" + pointer)
        for schema in _within([*self.parts.values()]):
            if "oneOf" in schema:
                self._one_of(schema)
        self._refuse_endless()
        return {"$ref": f"#/$defs/{first}", "$defs": self.parts}

    def _name(self, pointer: str) -> str:
        if pointer not in self.names:
            self.names[pointer] = str(len(self.names))
            self.pointers.append(pointer)
        return self.names[pointer]

    def _find(self, pointer: str) -> Any:
        found: Any = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise refused("$ref", "#" + pointer, "there is nothing there") from error
        return found

    def _part(self, schema: Any, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refused(path.split("/")[-1], path, f"{schema!r:.40} is no schema")
        self._check_base(schema, path)
        if "$ref" in schema and self.draft < 8:
            return self._reference(schema["$ref"], path)  # where it stands alone
        types = types_of(schema, path)
        out: dict[str, Any] = {}
        for key, value in schema.items():
            self._check(key, value, schema, types, path)
            rewrite = self._rewriters().get(key)
            if rewrite is not None:
                rewrite(out, value, schema, f"{path}/{key}")
        if "type" in schema:
            out["type"] = sorted(types) if len(types) != 1 else min(types)
        self._items(out, schema, path)
        add_numbers(out, schema, types, path)
        add_format(out, schema, types, path)
        check_spans(out, types, path)
        return out

    def _check_base(self, schema: dict[str, Any], path: str) -> None:
        """Refuse a part that gives its references another beginning."""
        own_id = schema.get("$id" if self.draft > 4 else "id")
        changes_base = isinstance(own_id, str) and not own_id.startswith("#")
        if changes_base and path != "#" and '"$ref"' in json.dumps(schema):
            raise refused("$id", path, "there are references in that part")

    def _check(
        self, key: str, value: Any, schema: dict[str, Any], types: frozenset[str], path: str
    ) -> None:
        concerned, harmless = REFUSED.get(key, (frozenset(), ()))
        if concerned & types and not any(value is each or value == each for each in harmless):
            raise refused(key, path)

    def _rewriters(self) -> dict[str, Callable[[dict[str, Any], Any, dict[str, Any], str], None]]:
        """By keyword; those that take several keywords together follow them."""
        lists = dict.fromkeys(("allOf", "anyOf", "oneOf"), self._list)
        maps = dict.fromkeys(("properties", "patternProperties"), self._map)
        return {
            **lists,
            **maps,
            **dict.fromkeys(COUNTS, add_count),
            "additionalProperties": self._single,
            "required": add_required,
            "const": add_constant,
            "enum": add_constant,
            "pattern": add_pattern,
            "$ref": self._sibling_reference,
            "not": self._not,
            "if": self._if,
            **dict.fromkeys(DEPENDENT, self._dependent),
            "propertyNames": self._names_of_properties,
            "unevaluatedProperties": self._unevaluated,
            "uniqueItems": self._unique,
        }

    def _single(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        out[path.rsplit("/", 1)[1]] = self._part(value, path)

    def _list(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        key = path.rsplit("/", 1)[1]
        if not isinstance(value, list) or not value:
            raise refused(key, path, "it must be a list of schemas")
        parts = [self._part(each, f"{path}/{index}") for index, each in enumerate(value)]
        if key == "oneOf":
            negation = self._negation(self._listed_names(value, path))
            self.negations[id(parts)] = [(negation.of(s), negation.lost(s)) for s in value]
        add_part(out, {key: parts})

    def _map(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        key = path.rsplit("/", 1)[1]
        if not isinstance(value, dict):
            raise refused(key, path, "it must map names to schemas")
        if key == "patternProperties":
            for pattern in value:
                check_pattern(key, pattern, path)
        if any(map(UNWRITABLE.search, value)):
            raise refused(key, path, "a name has control characters")
        out[key] = {
            name: self._part(each, f"{path}/{name.replace('~', '~0').replace('/', '~1')}")
            for name, each in value.items()
        }

    def _negation(self, names: Collection[str] = ()) -> Negation:
        return Negation(
            lambda target: self._find(self._pointer(target, "#")),
            lambda schema: self._part(schema, "#"),
            self.draft,
            names,
        )

    def _listed_names(self, schemas: list[Any], path: str) -> dict[str, None]:
        """The names of the properties that schemas list, or those that they refer to."""
        names: dict[str, None] = {}
        for schema in schemas:
            if isinstance(schema, dict) and "$ref" in schema:
                schema = self._find(self._pointer(schema["$ref"], path))
            listed = schema.get("properties") if isinstance(schema, dict) else None
            names |= dict.fromkeys(listed) if isinstance(listed, dict) else {}
        return names

    def _opposite(self, value: Any, schema: dict[str, Any], path: str) -> Schema:
        """What a value is that does not fit, beside the rest of a schema."""
        negation = self._negation()
        opposite = negation.of(value)
        if opposite is None or negation.lost(value) & types_of(schema, path):
            raise refused(path.rsplit("/", 1)[1], path)
        return opposite

    def _not(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        demand(out, self._opposite(value, schema, path))

    def _if(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        """Say that the condition and `then` hold, or that it does not and `else` does."""
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if then is True and otherwise is True:
            return
        negation = self._opposite(value, schema, path)
        base = path.rsplit("/", 1)[0]
        met = [self._part(value, path), self._part(then, f"{base}/then")]
        not_met = [negation, self._part(otherwise, f"{base}/else")]
        demand(out, {"anyOf": [{"allOf": met}, {"allOf": not_met}]})

    def _dependent(
        self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str
    ) -> None:
        if not isinstance(value, dict):
            raise refused(path.rsplit("/", 1)[1], path, "it must map names to what they need")
        for name, needed in value.items():
            needed = [needed] if isinstance(needed, str) else needed
            part = {"required": needed} if isinstance(needed, list) else needed
            absent = {"properties": {name: False}}
            demand(out, {"anyOf": [absent, self._part(part, f"{path}/{name}")]})

    def _unevaluated(
        self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str
    ) -> None:
        """The same as additionalProperties where no other part may evaluate properties."""
        if value in (True, {}) or "additionalProperties" in schema:
            return
        if APPLICATORS & {*schema}:
            raise refused("unevaluatedProperties", path)
        out["additionalProperties"] = self._part(value, path)

    def _names_of_properties(
        self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str
    ) -> None:
        """Write what names may be as the pattern of all properties that are not listed."""
        if isinstance(value, dict) and "$ref" in value:
            value = self._find(self._pointer(value["$ref"], path))
        pattern = name_pattern(value)
        others = schema.get("additionalProperties", True)
        if pattern == "":
            return
        if pattern is None or "patternProperties" in schema:
            raise refused("propertyNames", path)
        check_pattern("propertyNames", pattern, path)
        listed = schema.get("properties", {})
        if listed and others not in (True, {}, False):
            raise refused("propertyNames", path, "other properties have a schema of their own")
        # llguidance matches the names of listed properties too, in linear time.
        found = True if others is False else self._part(others, path)
        demand(out, {"patternProperties": {pattern: found}, "additionalProperties": False})

    def _sibling_reference(
        self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str
    ) -> None:
        add_part(out, self._reference(value, path.rsplit("/", 1)[0]))

    def _reference(self, target: Any, path: str) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._name(self._pointer(target, path))}"}

    def _pointer(self, target: Any, path: str) -> str:
        if not isinstance(target, str):
            raise refused("$ref", path, "it must be a string")
        root_id = self.root.get("$id", self.root.get("id")) if isinstance(self.root, dict) else None
        own = root_id.partition("#")[0] if isinstance(root_id, str) else ""
        base, _, fragment = target.partition("#")
        try:
            is_own = not base or urljoin(own, base) == own
        except ValueError as error:
            raise refused("$id", path, f"{own!r:.80} is no address ({error})") from error
        if not is_own:
            raise refused("$ref", path, f"{target!r:.80} is no path within the schema")
        if fragment and not fragment.startswith("/"):
            raise refused("$ref", path, f"{target!r:.80} is no path")
        return unquote(fragment)

    def _items(self, out: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        """Write the items of arrays as the newest draft does."""
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            first, rest = "items", "additionalItems"
        elif first in schema and self.draft < 10:
            raise refused(first, path, "it is not in the schema's draft")
        if first in schema:
            holder: dict[str, Any] = {}
            self._list(holder, schema[first], schema, f"{path}/{first}")
            out["prefixItems"] = holder[first]
        if rest in schema:
            out["items"] = self._part(schema[rest], f"{path}/{rest}")

    def _unique(self, out: dict[str, Any], value: Any, schema: dict[str, Any], path: str) -> None:
        """Spell the lists of a few texts or whole numbers out: in the order that `enum` has."""
        path, types = path.rsplit("/", 1)[0], types_of(schema, path)
        if value is False or "array" not in types or schema.get("maxItems") in (0, 1):
            return
        values = self._listed_values(schema.get("items"), path)
        counts = [schema.get("minItems", 0), schema.get("maxItems", len(values))]
        if not values or {*map(type, counts)} != {int} or "prefixItems" in schema:
            raise refused("uniqueItems", path)
        sizes = range(max(counts[0], 0), min(counts[1], len(values)) + 1)
        is_long = len(values) > MAX_LISTS  # and to count their lists would take long
        if is_long or sum(math.comb(len(values), size) for size in sizes) > MAX_LISTS:
            raise refused("uniqueItems", path, "enum has too many values")
        lists = [[*chosen] for size in sizes for chosen in combinations(values, size)]
        others: list[Schema] = [{"type": sorted(types - {"array"})}] if len(types) > 1 else []
        demand(out, {"anyOf": [{"enum": lists} if lists else False, *others]})

    def _listed_values(self, items: Any, path: str) -> list[Any]:
        """The values that items may have, if nothing is said of these but their list."""
        if isinstance(items, dict) and "$ref" in items:
            items = self._find(self._pointer(items["$ref"], path))
        if not isinstance(items, dict) or not isinstance(items.get("enum"), list):
            return []
        values = items["enum"]
        kinds = {*map(type, values)}
        name = "string" if kinds == {str} else "integer" if kinds == {int} else ""
        is_known = items.get("type", name) == name and items.keys() <= {"enum", "type", *NOTES}
        return [*dict.fromkeys(values)] if name and is_known else []

    def _one_of(self, schema: dict[str, Any]) -> None:
        """Write oneOf as anyOf, each option with the negation of those that it may overlap."""
        options, exclusive = schema["oneOf"], []
        if len(options) > MAX_OPTIONS:
            return  # and llguidance refuses it
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        for index, option in enumerate(options):
            within: Schema = {"allOf": [rest, option]}
            others = [
                self._excluded(options, i, within)
                for i, other in enumerate(options)
                if i != index and not are_disjoint(within, other, self.parts)
            ]
            if None in others:
                return
            exclusive.append({"allOf": [option, *others]} if others else option)
        del schema["oneOf"]
        add_part(schema, {"anyOf": exclusive})

    def _excluded(self, options: list[Schema], index: int, within: Schema) -> Schema | None:
        """The negation of an option; None where no value of some type would be left."""
        negation, lost = self.negations[id(options)][index]
        if negation is None:
            return None
        gone = kinds_of(lost, within, self.parts) - kinds_of(TYPES, negation, self.parts)
        return None if gone else negation

    def _refuse_endless(self) -> None:
        """Refuse parts that no text of finite length fits: they require themselves."""
        finite: set[str] = set()
        names, num_before = list(self.parts), -1
        while len(finite) > num_before:
            num_before = len(finite)
            names.reverse()  # a chain of parts, either way, is done at once
            for name in names:
                if name not in finite and _is_finite(self.parts[name], finite):
                    finite.add(name)
        for pointer, name in self.names.items():
            if name not in finite:
                keyword = "false" if self.parts[name] is False else "$ref"
                raise refused(keyword, "#" + pointer, "no text of finite length fits")


def _draft(root: Schema) -> int:
    """The draft's number; the two after 7 count as 8 and, like no draft at all, 10."""
    name = root.get("$schema") if isinstance(root, dict) else None
    found = re.search(r"draft-0([3-7])|draft/2019", name) if isinstance(name, str) else None
    return 10 if found is None else int(found[1] or 8)


def _within(schemas: list[Schema]) -> Iterator[dict[str, Any]]:
    """Every part of rewritten schemas, the inner ones first."""
    for schema in schemas:
        if isinstance(schema, dict):
            yield from _within(_children(schema))
            yield schema


def _children(schema: dict[str, Any]) -> list[Schema]:
    lists = [schema.get(key, ()) for key in ("allOf", "anyOf", "oneOf", "prefixItems")]
    lists += [schema.get(key, {}).values() for key in ("properties", "patternProperties")]
    lists += [[schema[key]] for key in ("items", "additionalProperties") if key in schema]
    return [each for some in lists for each in some]


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    """Whether a text of finite length fits, given the names of parts for which one does."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rsplit("/", 1)[1] not in finite:
        return False
    if not all(_is_finite(each, finite) for each in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_is_finite(each, finite) for each in schema[key]):
            return False
    if schema.get("type") == "object":
        needed = [
            schema.get("properties", {}).get(name, True) for name in schema.get("required", ())
        ]
    elif schema.get("type") == "array":
        items = [*schema.get("prefixItems", ()), schema.get("items", True)]
        needed = items[: schema.get("minItems", 0)]
    else:
        return True
    return all(_is_finite(each, finite) for each in needed)
