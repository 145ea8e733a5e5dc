"""JSON schemas are refused by name or fully enforced: grammars accept valid texts only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.engine.input_processor import Vocabulary
from nanovllm.errors import RequestError
from nanovllm.features.grammar.guidance import GuidanceEngine, GuidanceMatcher
from nanovllm.features.grammar.json_schema import enforceable
from tests.json_schemas import CONDITIONS, random_schema

VOCAB_SIZE, EOS = 49152, 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(find_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> GuidanceEngine:
    vocabulary = Vocabulary(tokenizer, frozenset({EOS}))
    return GuidanceEngine(lambda: vocabulary, VOCAB_SIZE)


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
REFUSED: list[tuple[str, Any]] = [
    ("'uniqueItems' at # ", {"type": "array", "uniqueItems": True}),
    ("'not' at #/properties/a ", {"properties": {"a": {"not": {"pattern": "a"}}}}),
    ("'not' at # ", {"not": {}}),
    ("'if' at # ", {"if": {"multipleOf": 3}, "then": {"const": 1}}),
    ("'contains' at # ", {"contains": {"type": "null"}}),
    ("'propertyNames' at # ", {"propertyNames": {"format": "date"}}),
    ("'dependentRequired' at # ", {"dependentRequired": {"a": ["b"]}}),
    ("'dependentSchemas' at # ", {"dependentSchemas": {"a": {"minProperties": 2}}}),
    ("'dependencies' at # ", {"dependencies": {"a": ["b"]}}),
    ("'unevaluatedProperties' at # ", {"unevaluatedProperties": False}),
    ("'unevaluatedItems' at # ", {"unevaluatedItems": False}),
    ("'$dynamicRef' at # ", {"$dynamicRef": "#a"}),
    ("'$ref' at # ", {"$ref": "other.json#/a"}),
    ("'$ref' at # ", {"$ref": "#name"}),
    ("'$ref' at # ", {"$ref": 5}),
    ("'$ref' at #/$defs/missing ", {"$ref": "#/$defs/missing"}),
    ("'$ref' at # .*finite", {"$ref": "#"}),
    ("finite", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ("finite", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    (
        "'$ref' at #/$defs/b .*finite",
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"type": ["object", "null"], "properties": {"b": {"$ref": "#/$defs/b"}}},
                "b": {
                    "type": "object",
                    "properties": {"b": {"$ref": "#/$defs/c"}},
                    "required": ["b"],
                },
                "c": {"allOf": [{"$ref": "#/$defs/b"}]},
            },
        },
    ),
    ("'$id' at #/properties/a ", {"properties": {"a": {"$id": "x", "$ref": "#/b"}}, "b": {}}),
    ("'format' at # ", {"type": "string", "format": 5}),
    ("'pattern' at # ", {"pattern": "(?=a)b"}),
    ("'pattern' at # ", {"pattern": "\\bword"}),
    ("'pattern' at # ", {"pattern": "^\\D+$"}),
    ("'pattern' at # ", {"pattern": "[^\\w]"}),
    ("is not supported", {"pattern": "^[\\p{L}\\p{N}_-]*$"}),
    ("'pattern' at # ", {"pattern": "[a-z&&[^b]]"}),
    ("'pattern' at # ", {"pattern": "(a)\\1"}),
    ("'pattern' at # ", {"pattern": ["a"]}),
    ("'pattern'", {"pattern": "("}),
    ("'patternProperties' at # ", {"patternProperties": {"(?!a)": {}}}),
    ("disjoint", {"patternProperties": {"^a": {"const": 1}, "a$": {"const": 2}}}),
    ("'oneOf'", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
    ("'oneOf'", {"oneOf": [{"type": kind} for kind in ("integer", "number", "null")]}),
    ("'oneOf'", {"oneOf": [{"type": "object", "required": [name]} for name in "ab"]}),
    ("'oneOf'", {"oneOf": [{}, {"type": "null"}]}),
    (
        "'oneOf'.*'anyOf'",
        {"type": "object", "properties": {"a": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}}},
    ),
    ("'multipleOf' at # ", {"type": "number", "multipleOf": 0.01}),
    ("'multipleOf' at # ", {"type": "number", "multipleOf": 0}),
    ("'minProperties' at # ", {"type": "object", "minProperties": 2}),
    ("maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}),
    ("'minimum' at # ", {"type": "integer", "minimum": 10**19}),
    ("'exclusiveMinimum' at # ", {"minimum": 1, "exclusiveMinimum": True}),
    ("minimum", {"type": "number", "minimum": 2, "maximum": 1}),
    ("minLength", {"type": "string", "minLength": 2, "maxLength": 1}),
    ("'minLength' at # ", {"minLength": "2"}),
    ("'const' at # ", {"const": 2**53 + 1}),
    ("'const' at # ", {"const": "nul\0"}),
    ("'enum' at # ", {"enum": [{"a\x1f": 1}]}),
    ("'properties' at # ", {"properties": {"a\x1f": {}}}),
    ("nsatisfiable", {"enum": []}),
    ("type", {"type": "text"}),
    ("'required' at #/properties/a ", {"properties": {"a": {"required": True}}}),
    ("'prefixItems' at # ", {"$schema": DRAFT_7, "prefixItems": [{}]}),
    ("'a' at #/properties/a ", {"properties": {"a": 5}}),
    ("'properties' at # ", {"properties": 5}),
    ("'patternProperties' at # ", {"patternProperties": ["a"]}),
    ("'anyOf' at # ", {"anyOf": {}}),
]


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
def test_refusals_name_the_keyword(grammars: GuidanceEngine, keyword: str, schema: Any) -> None:
    with pytest.raises(RequestError, match=keyword.replace("$", r"\$")):
        grammars.compile({"json": schema})


def test_a_refusal_names_the_path() -> None:
    schema = {"properties": {"a/b": {"anyOf": [{"uniqueItems": True}]}}}
    with pytest.raises(RequestError, match="'uniqueItems' at #/properties/a~1b/anyOf/0 "):
        enforceable(schema)


def test_deep_nesting_is_refused(grammars: GuidanceEngine) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="deep"):
        grammars.compile({"json": schema})


ACCEPTED: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ['{"a":1}', '{"b":"x"}'],
        ['{"a":"x"}', '{"\\u0061":"x"}'],
    ),
    (
        {"prefixItems": [{"type": "string"}], "items": {"type": "null"}, "additionalItems": False},
        ['["a"]', '["a",null]'],
        ["[null]"],
    ),
    (
        {"items": [{"type": "string"}], "additionalItems": {"type": "null"}},
        ['["a",null]'],
        ["[1]", '["a",1]'],
    ),
    (
        {"minimum": 0, "enum": [0, 1, 2], "maximum": 1},
        ["0", "1"],
        ["2"],
    ),
    (
        {"items": [{}], "allOf": [{"type": "array"}], "additionalItems": False},
        ["[]", "[1]"],
        ["1", "[1,1]"],
    ),
    ({"type": "number", "exclusiveMaximum": 100}, ["99.5"], ["100", "99.99999999999999999999"]),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.9", "0.99", "-5"], ["1", "1.0"]),
    (
        {"type": "number", "exclusiveMinimum": 98.0, "maximum": 98.5},
        ["98.1", "98.000001", "98.5"],
        ["98", "98.0", "98.00000000000000000001"],
    ),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.1"], ["0", "-0"]),
    ({"type": ["integer", "null"], "exclusiveMinimum": 3}, ["4", "null"], ["3", "3.5"]),
    ({"minimum": -0.25, "maximum": 99.95}, ["99.94", "-0.25", '"a"'], ["-0.3", "99.96"]),
    ({"type": "number", "maximum": 1.625, "multipleOf": 0.5}, ["1.5"], ["1.6", "1.62"]),
    ({"type": "string", "format": "date"}, ['"2024-01-31"'], ['"2023-02-29"', '"0000-01-01"']),
    (
        {"type": "string", "format": "date-time", "pattern": "Z$"},
        ['"2024-02-28T23:59:59Z"'],
        ['"2024-02-28T23:59:60Z"', '"2024-02-28T23:59:59+01:00"'],
    ),
    ({"type": "string", "format": "idn-email"}, ['"a@b.c"'], ['"a"']),
    ({"type": "string", "format": "uri-reference"}, ['"http://a.b/c"'], ['"\\\\"']),
    ({"type": "string", "format": "of-our-own"}, ['"a"'], ["1"]),
    ({"type": "string", "pattern": "^\\S$"}, ['"é"'], ['" "', '"\\u001c"']),
    (
        {"$schema": DRAFT_7, "$ref": "#/a", "a": {"type": "null"}, "type": "string"},
        ["null"],
        ['"a"'],
    ),
    (
        {"$ref": "#/a", "a": {"type": ["null", "string"]}, "type": "string"},
        ['"a"'],
        ["null"],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                k: {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
                for k in "ab"
            },
        },
        ['{"k":"a"}', '{"k":"b","x":1}'],
        ["{}", '{"k":"c"}'],
    ),
    (
        {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}],
            "$defs": {"list": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        },
        ["null", "[]", "[[null]]"],
        ["1", "[1]"],
    ),
    (
        {
            "$id": "https://x.org/a/b.json",
            "items": {"$ref": "https://x.org/a/b.json#/$defs/c"},
            "$defs": {
                "c": {"$id": "#c", "type": "array", "items": {"$ref": "#/$defs/d"}},
                "d": {"const": 1},
            },
        },
        ["[[1]]"],
        ["[1]", "[[2]]"],
    ),
    (
        {
            "properties": {"a": {"type": "integer"}, "b": {}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}', "5"],
        ["{}", '{"c":1}', '{"a":"x"}'],
    ),
    (
        {
            "allOf": [
                {"patternProperties": {"^x": {"type": "integer"}}},
                {"additionalProperties": {"minimum": 5}},
            ],
            "type": "object",
        },
        ['{"x":6}', '{"y":6}'],
        ['{"x":1}', '{"x":"a"}', '{"y":1}'],
    ),
    (
        {"title": "a\0", "x-own": {"not": {}}, "deprecated": True, "uniqueItems": False},
        ["[1, 1]"],
        [" 1"],
    ),
    ({"const": {"k": 1}, "patternProperties": {"^x": {}}}, ['{"k":1}'], ['{"k":1,"x":1}']),
    (True, ["[1, null]"], [" 1"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), ACCEPTED)
def test_grammars_accept_valid_texts_only(
    grammars: GuidanceEngine, tokenizer: Any, schema: Any, valid: Any, invalid: Any
) -> None:
    grammar = grammars.compile({"json": schema})

    def fits(text: str) -> bool:
        inner = grammars.matcher(grammar, frozenset()).inner
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return inner.try_consume_tokens(token_ids) == len(token_ids) and inner.is_accepting()

    assert [text for text in valid if not fits(text)] == []
    assert [text for text in invalid if fits(text)] == []


def new_masks(num_rows: int, num_words: int) -> np.ndarray:
    return np.empty((num_rows, num_words), np.int32)


class Walker:
    """Generates random texts that a grammar accepts, and ends them when possible after a while."""

    def __init__(self, grammars: GuidanceEngine, tokenizer: Any) -> None:
        self.grammars, self.decode = grammars, tokenizer.decode
        texts = [tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)]
        self.weights = 1.0 / (1 + np.array([len(text) for text in texts])) ** 2
        self.closing = [texts.index(text) for text in '}]",']

    def walk(self, schema: Any, seed: int, max_tokens: int = 200) -> str | None:
        """Return a text, or None if it did not end within `max_tokens`."""
        rng = np.random.default_rng(seed)
        matcher = self.grammars.matcher(self.grammars.compile({"json": schema}), frozenset({EOS}))
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            bits = np.unpackbits(self._mask(matcher).view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:VOCAB_SIZE])
            token_id = self._choose(allowed, bits, len(token_ids) > 25, rng)
            if token_id == EOS:
                break
            token_ids.append(token_id)
            if matcher.finishes(token_id):
                break
        else:
            return None
        return str(self.decode(token_ids))

    def _mask(self, matcher: GuidanceMatcher) -> np.ndarray:
        while True:  # on a busy machine a bitmask may be late; ask again when it is ready
            masks, late = self.grammars.masks([(matcher, [])], new_masks)
            if not late:
                return masks[0]
            assert matcher.job is not None
            matcher.job.result()

    def _choose(
        self, allowed: np.ndarray, bits: np.ndarray, wants_end: bool, rng: np.random.Generator
    ) -> int:
        closing = [token_id for token_id in (EOS, *self.closing) if bits[token_id]]
        if wants_end and closing and rng.random() < 0.8:
            return closing[0]
        some = allowed[rng.integers(0, len(allowed), 64)]
        shares = np.cumsum(self.weights[some])
        return int(some[np.searchsorted(shares, rng.random() * shares[-1])])


@pytest.fixture(scope="module")
def walker(grammars: GuidanceEngine, tokenizer: Any) -> Walker:
    return Walker(grammars, tokenizer)


@pytest.mark.endurance
def test_random_texts_are_valid(walker: Walker, count: Callable[..., int]) -> None:
    """Check three texts of each schema. Of few, more than 15% may be refused by chance."""
    num_schemas = count(500, few=15)
    schemas = [random_schema(seed, has_conditions=False) for seed in range(num_schemas)]
    texts = [texts_of(walker, schema, seed) for seed, schema in enumerate(schemas)]
    assert sum(len(some) for some in texts if some is not None) >= num_schemas
    assert texts.count(None) <= max(0.15 * num_schemas, 5)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: json.dumps(condition)[:60])
def test_conditions_are_refused_or_enforced(walker: Walker, condition: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": condition}, "required": ["a"]}
    texts_of(walker, {**schema, "additionalProperties": False}, seed=0)


def texts_of(walker: Walker, schema: Any, seed: int) -> list[str] | None:
    """Generate three texts and check those that end; return None if the schema is refused."""
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        texts = [walker.walk(schema, 3 * seed + i) for i in range(3)]
    except RequestError as error:
        if not re.search(r"'[\w$]+' at #|oneOf|nsatisfiable", str(error)):
            raise
        return None
    ended = [text for text in texts if text is not None]
    for text in ended:
        assert validator.is_valid(json.loads(text)), (seed, text)
    return ended
