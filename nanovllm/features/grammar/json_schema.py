"""Prepare JSON schemas for llguidance, whose own compiler enforces them.

Annotations are dropped, and the rest is rewritten so that llguidance interprets it as the standard
does. A keyword that llguidance would ignore or misinterpret raises GrammarError.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from nanovllm.errors import GrammarError

Schema = dict[str, Any] | bool

EXACT = 2**53  # llguidance parses numbers as float64, which is exact for integers up to this one
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEPT = ("type", "required", "const", "enum", "pattern", "multipleOf", *COUNTS, *BOUNDS)
MAPS = ("properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
KEYWORDS = frozenset((*KEPT, *MAPS, *LISTS, "additionalProperties", "items", "$ref"))
COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "const", "enum")
SHAPES: dict[str, Any] = {"required": list, "format": str, "pattern": str}
SHAPES |= dict.fromkeys(COUNTS, int) | dict.fromkeys(MAPS, dict) | dict.fromkeys(LISTS, list)
# Keywords that cannot be enforced -> values that are accepted because they constrain nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("if", "contains", "$dynamicRef", "$recursiveRef", "disallow", "extends"), ()),
    **dict.fromkeys(("not", "uniqueItems", "divisibleBy"), (False,)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
# How each format is enforced; one that llguidance lacks becomes a narrower format or pattern. Dates
# and times exclude what some validators reject: years before 1000, February 29 and leap seconds.
DATE, TIME = "[1-9].{3}-(?:02-(?:[01].|2[0-8])|(?:0[13-9]|1[0-2])-..)", ".{6}[0-5]"
URIS = ("uri", "iri", "uri-reference", "iri-reference", "uri-template")
FORMATS = {
    **{key: {"format": key} for key in ("duration", "email", "hostname", "ipv4", "ipv6", "uuid")},
    **{key: {"format": key[4:]} for key in ("idn-email", "idn-hostname")},
    **{key: {"format": "uri"} for key in URIS},
    "date": {"format": "date", "pattern": f"^{DATE}"},
    "time": {"format": "time", "pattern": f"^{TIME}"},
    "date-time": {"format": "date-time", "pattern": f"^{DATE}T{TIME}"},
    "json-pointer": {"pattern": "^(?:/[A-Za-z0-9_-]*)*$"},
    "relative-json-pointer": {"pattern": "^[0-9]#?$"},
    "regex": {"pattern": "^[A-Za-z0-9_ -]*$"},
}
# REGEX_TOKEN matches any token of a regular expression: an escape, set, special group or character.
# REFUSED_TOKEN matches tokens that llguidance does not support, or that validators interpret
# differently.
REGEX_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(\?(?:P?<?[=!]|P<|.)|.", re.DOTALL)
REFUSED_TOKEN = re.compile(
    r"(?s)\\[DWbBAZzGpPXRkhHQEcNKC1-9]|\[\^.*\\[dw]|\[.*(\\[DWbpP]|(?<!\\)\[|&&|--|~~)|\(\?(?!:|P<)"
)
# Control characters that JSON can only write as \uXXXX, which the output never contains.
UNWRITABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")


def enforceable(schema: Schema) -> dict[str, Any]:
    """Return the schema in a form that llguidance fully enforces, or raise GrammarError."""
    preparation, parts, pointers = _Preparation(schema), {}, [""]
    names, contained = preparation.names, preparation.contained
    for pointer in pointers:
        part = preparation.find(pointer)
        parts[names[pointer]] = preparation.schema(part, "#" + pointer, names[pointer])
        pointers += [*names][len(pointers) :]  # add the pointers that this subschema refers to
    cyclic: set[str | None] = {*contained}
    while cyclic != (rest := {name for name in cyclic if contained[name] & cyclic}):
        cyclic = rest
    for pointer in pointers:
        if names[pointer] in cyclic:  # every value would have to contain itself
            raise refused("$ref", "#" + pointer, "no finite text matches")
    return {"$ref": "#/$defs/0", "$defs": parts}


def refused(keyword: str, path: str, reason: str) -> GrammarError:
    return GrammarError(f"{keyword!r} at {path} cannot be enforced: {reason}")


class _Preparation:
    def __init__(self, root: Schema) -> None:
        self.root = root
        self.names = {"": "0"}  # JSON pointer of a referenced subschema -> its name in $defs
        # Subschema -> subschemas that it requires; a cycle means that no finite value matches.
        self.contained: dict[str | None, set[str]] = {}
        head = root if isinstance(root, dict) else {}
        draft = re.search(r"draft-0([3-7])|draft/2019", str(head.get("$schema")))
        self.draft = 10 if draft is None else int(draft[1] or 8)  # 10: 2020-12, the default
        self.id_key = "$id" if self.draft > 4 else "id"
        self.root_id = str(head.get(self.id_key, "")).rstrip("#")

    def schema(self, schema: Any, path: str, part: str | None) -> Schema:
        """Prepare a schema.

        `part` is the name of the `$defs` entry that contains this schema if every value of the
        entry must contain a value of this schema, otherwise None. `_reference` uses it to record
        which entries require each other: no finite value satisfies a cycle.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refused(path.rsplit("/", 1)[-1], path, f"{schema!r:.40} is not a schema")
        if "$ref" in schema and self.draft < 8:
            schema = {"$ref": schema["$ref"]}  # older drafts ignore the siblings of $ref
        for key, value in schema.items():
            self._check(key, value, path)
        if isinstance(schema.get("items"), list):  # the tuple form of older drafts
            rest = schema.get("additionalItems", True)
            schema = {**schema, "prefixItems": schema["items"], "items": rest}
        # Combining keywords come last: llguidance treats keywords before and after them separately.
        keys = sorted((key for key in schema if key in KEYWORDS), key=COMBINING.__contains__)
        out = {key: self._value(key, schema, path, part) for key in keys}
        if (name := schema.get("format")) in FORMATS:  # unknown formats are only annotations
            out["allOf"] = [*out.get("allOf", ()), FORMATS[name]]
        if out.get("type") != "integer" and {*BOUNDS[2:]} & {*out}:
            _limit_digits(out)
        return out

    def _check(self, key: str, value: Any, path: str) -> None:
        """Reject keywords that are not enforced, and malformed values."""
        if (
            value not in REFUSED.get(key, (value,))
            or not isinstance(value, SHAPES.get(key, object))
            or (key in (*BOUNDS, "multipleOf") and not _is_exact(value))
            or (key == "minProperties" and value > 1)  # the output may repeat a property name
            or (key == "multipleOf" and (value <= 0 or value * 1024 % 1))  # not exact in binary
            or (key in (*MAPS, "const", "enum", "required") and not _is_writable(key, value))
            or (key == "prefixItems" and self.draft < 10)
            or (key == self.id_key and path != "#" and str(value)[:1] != "#")
        ):
            raise refused(key, path, f"{value!r:.80} is not supported")
        for pattern in {"pattern": [value], "patternProperties": value}.get(key, ()):
            for token in REGEX_TOKEN.findall(pattern):
                if REFUSED_TOKEN.match(token):
                    raise refused(key, path, f"{token!r:.40} is not supported in {pattern!r:.80}")

    def _value(self, key: str, schema: dict[str, Any], path: str, part: str | None) -> Any:
        value, kind = schema[key], schema.get("type")
        if key in KEPT:
            return value
        if key == "$ref":
            return self._reference(value, path, part)
        if key not in (*MAPS, *LISTS):
            is_needed = key == "items" and kind == "array" and schema.get("minItems")
            return self.schema(value, f"{path}/{key}", part if is_needed else None)
        needed = {*map(str, schema.get("required", ()))} if kind == "object" else set()

        def child(name: str | int, schema: Any) -> Schema:
            where = f"{path}/{key}/{str(name).replace('~', '~0').replace('/', '~1')}"
            out = self.schema(schema, where, part if name in needed or key == "allOf" else None)
            if key == "oneOf" and isinstance(out, dict) and "$ref" in out:
                out = {"minLength": 0, **out}  # llguidance resolves a $ref only with a sibling key
            return out

        if key in MAPS:
            return {name: child(name, each) for name, each in value.items()}
        return [child(index, each) for index, each in enumerate(value)]

    def _reference(self, target: Any, path: str, part: str | None) -> str:
        base, _, pointer = target.partition("#") if isinstance(target, str) else ("?", "", "")
        if base not in ("", self.root_id) or pointer[:1] not in ("", "/"):
            raise refused("$ref", path, f"{target!r:.80} is not a path within the schema")
        name = self.names.setdefault(unquote(pointer), str(len(self.names)))
        self.contained.setdefault(part, set()).add(name)
        return f"#/$defs/{name}"

    def find(self, pointer: str) -> Any:
        found: Any = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise refused("$ref", "#" + pointer, "the path does not exist") from error
        return found


def _limit_digits(out: dict[str, Any]) -> None:
    """Limit the digits of floats, since more digits could round a value to its exclusive bound.

    An exclusive bound on the side of zero becomes inclusive and moves away from zero by one unit of
    the last digit, because llguidance would otherwise accept 5 as a number between 5 and 5.5.
    """
    num_digits = max(0, min(9, 15 - len(str(int(max(abs(out.get(key, 0)) for key in BOUNDS))))))
    out.setdefault("multipleOf", float(f"1e-{num_digits}"))
    for key, strict, sign in ((BOUNDS[0], BOUNDS[2], 1), (BOUNDS[1], BOUNDS[3], -1)):
        if out.get(strict, -sign) * sign >= 0:
            moved = round(out.pop(strict) + sign * 10**-num_digits, num_digits)
            out[key] = sign * max(sign * out.get(key, moved), sign * moved)


def _is_exact(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < EXACT


def _is_writable(key: str, value: Any) -> bool:
    """Whether the output can contain the property names, strings and numbers in a value."""
    text, numbers = json.dumps([*value] if key in MAPS else value), list[str]()
    json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
    return not UNWRITABLE.search(text) and all(_is_exact(float(number)) for number in numbers)
