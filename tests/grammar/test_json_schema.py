"""JSON schemas are refused by name or enforced whole: no text that a grammar takes is invalid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import jsonschema
import numpy as np
import pytest

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.errors import RequestError
from nanovllm.grammar.json_negation import Negation
from nanovllm.grammar.json_schema import enforceable
from nanovllm.grammar.matching import Grammars, Matcher, Vocabulary
from tests.json_schemas import random_schema

VOCAB_SIZE, EOS = 49152, 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(find_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    vocabulary = Vocabulary(tokenizer, frozenset({EOS}))
    return Grammars(lambda: vocabulary, VOCAB_SIZE)


REFUSED: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("uniqueItems", {"items": {"enum": [*range(9)]}, "uniqueItems": True}),
    ("uniqueItems", {"items": {"enum": [*range(10_000)]}, "uniqueItems": True}),
    ("uniqueItems", {"prefixItems": [{}], "items": {"enum": [1, 2]}, "uniqueItems": True}),
    ("uniqueItems", {"items": {"enum": ["a", 1]}, "uniqueItems": True}),
    ("uniqueItems", {"items": {"enum": ["a", "b"], "maxLength": 1}, "uniqueItems": True}),
    ("uniqueItems", {"uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": "1"}),
    ("not", {"properties": {"a": {"not": {"pattern": "a"}}}}),
    ("not", {"not": {}}),
    ("not", {"type": ["string", "null"], "not": {"type": "string", "pattern": "^_"}}),
    ("not", {"type": ["array", "null"], "not": {"type": "array", "items": {"const": 1}}}),
    ("not", {"type": "number", "not": {"type": "integer"}}),
    ("not", {"type": ["object", "null"], "not": {"type": "object", "maxProperties": 1}}),
    ("not", {"type": ["number", "null"], "not": {"type": "number", "multipleOf": 1}}),
    ("not", {"type": ["array", "null"], "not": {"type": "array", "contains": {}}}),
    ("not", {"type": ["integer", "null"], "not": {"type": "number", "multipleOf": 3}}),
    (
        "if",
        {
            "type": ["integer", "null"],
            "if": {"type": "number", "multipleOf": 3},
            "then": {"minimum": 10},
        },
    ),
    ("not", {"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": "a"}}),
    ("if", {"if": {"multipleOf": 3}, "then": {"const": 1}}),
    (
        "if",
        {
            "type": "object",
            "if": {"properties": {"a": {"pattern": "^x"}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
    ),
    ("contains", {"contains": {"type": "null"}}),
    ("propertyNames", {"propertyNames": {"format": "date"}}),
    ("propertyNames", {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}),
    (
        "propertyNames",
        {
            "propertyNames": {"maxLength": 2},
            "properties": {"a": {}},
            "additionalProperties": {"type": "null"},
        },
    ),
    ("dependentRequired", {"dependentRequired": ["a", "b"]}),
    ("minProperties", {"dependentSchemas": {"a": {"minProperties": 2}}}),
    ("unevaluatedProperties", {"unevaluatedProperties": False, "allOf": [{}]}),
    ("unevaluatedItems", {"unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("$ref", {"$ref": "other.json#/a"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("$ref", {"$ref": "#name"}),
    ("$ref", {"$ref": "#"}),
    ("$ref", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ("$id", {"properties": {"a": {"$id": "x", "$ref": "#/b"}}, "b": {}}),
    ("format", {"type": "string", "format": 5}),
    ("pattern", {"pattern": "(?=a)b"}),
    ("pattern", {"pattern": "\\bword"}),
    ("pattern", {"pattern": "^\\D+$"}),
    ("pattern", {"pattern": "[^\\w]"}),
    ("is not supported", {"pattern": "^[\\p{L}\\p{N}_-]*$"}),
    ("pattern", {"pattern": "[a-z&&[^b]]"}),
    ("pattern", {"pattern": "(a)\\1"}),
    ("pattern", {"pattern": "("}),
    ("patternProperties", {"patternProperties": {"(?!a)": {}}}),
    ("oneOf", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
    ("oneOf", {"oneOf": [{"type": "string", "format": f} for f in ("ipv4", "ipv6")]}),
    ("oneOf", {"oneOf": [{"type": kind} for kind in ("integer", "number", "null")]}),
    ("multipleOf", {"type": "number", "multipleOf": 0.01}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    (
        "'minProperties' at #/minProperties ",
        {"minProperties": 1, "properties": {str(i): {} for i in range(100)}},
    ),
    (
        "'maxProperties' at #/items/maxProperties ",
        {"items": {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}},
    ),
    ("minimum", {"type": "integer", "minimum": 10**19}),
    ("minimum", {"type": "number", "minimum": 2, "maximum": 1}),
    ("minLength", {"type": "string", "minLength": 2, "maxLength": 1}),
    ("const", {"const": 2**53 + 1}),
    ("const", {"const": "nul\0"}),
    ("enum", {"enum": [{"a\x1f": 1}]}),
    ("enum", {"enum": []}),
    ("type", {"type": "text"}),
    ("required", {"properties": {"a": {"required": True}}}),
    ("prefixItems", {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}),
    ("properties", {"properties": {"a": 5}}),
]


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
def test_refusals_name_the_keyword(grammars: Grammars, keyword: str, schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile({"json": schema})
    assert keyword in str(caught.value)


def test_a_refusal_tells_where() -> None:
    schema = {"properties": {"a/b": {"items": [{"uniqueItems": True}]}}}
    with pytest.raises(RequestError, match="'uniqueItems' at #/properties/a~1b/items/0 "):
        enforceable(schema)


def test_deep_nesting_is_refused(grammars: Grammars) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="deep"):
        grammars.compile({"json": schema})


TAKEN: list[tuple[Any, list[Any], list[Any]]] = [
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
    ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, ["2"], ["1"]),
    ({"type": "number", "exclusiveMaximum": 100}, ["99.5"], ["100", "99.99999999999999999999"]),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.9", "0.99", "-5"], ["1", "1.0"]),
    ({"minimum": -0.25, "maximum": 99.95}, ["99.9", "-0.2", '"a"'], ["-0.3", "99.96"]),
    ({"type": "number", "minimum": 0.91, "maximum": 0.999}, ["0.99"], ["0.9", "0.9999"]),
    ({"type": "number", "maximum": 1.625, "multipleOf": 0.5}, ["1.5"], ["1.6", "1.62"]),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2023-02-29"', '"0000-01-01"']),
    ({"type": "string", "pattern": "^\\S$"}, ['"é"'], ['" "', '"\\u001c"']),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/a",
            "a": {"type": "null"},
            "type": "string",
        },
        ["null"],
        ['"a"'],
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
    ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
    ({"type": "string", "uniqueItems": True, "contains": {}}, ['"a"'], ["1"]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[]", "[1]"], ["[1, 1]"]),
    ({"items": {"enum": [1, 2]}, "maxItems": 1, "uniqueItems": True}, ["[2]"], ["[3]"]),
    (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        ["[]", '["a"]', '["b", "c"]', '["a","b","c"]'],
        ['["a","a"]', '["a","b","a"]', '["d"]'],
    ),
    (
        {
            "type": ["array", "null"],
            "items": {"$ref": "#/$defs/x"},
            "minItems": 1,
            "maxItems": 2,
            "uniqueItems": True,
            "$defs": {"x": {"type": "integer", "enum": [1, 2, 3, 2]}},
        },
        ["[1,3]", "[2]", "null"],
        ["[]", "[1,2,3]", "[1,1]", "[4]", "1"],
    ),
    ({"type": "string", "format": "of-our-own"}, ['"a"'], ["1"]),
    (
        {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        ["{}", '{"c":1}'],
        ['{"a":1}', '{"c":1,"b":2}'],
    ),
    (
        {"type": "string", "not": {"enum": ["", "ab", "a.", "é"]}},
        ['"a"', '"abc"', '"aé"', '"a\\n"'],
        ['""', '"ab"', '"a."', '"é"'],
    ),
    ({"type": ["string", "null"], "not": {"type": "string"}}, ["null"], ['"a"']),
    (
        {
            "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["size"]},
            "else": {"properties": {"size": False}},
            "type": "object",
        },
        ['{"kind":"a","size":1}', '{"kind":"b"}', '{"kind":"b","x":1}'],
        ['{"kind":"a"}', '{"kind":"b","size":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in "abc"},
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"c": {"properties": {"b": {"const": 7}}}},
        },
        ["{}", '{"b":1}', '{"a":1,"b":2}', '{"b":7,"c":1}', '{"c":1}'],
        ['{"a":1}', '{"b":1,"c":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"no-name": {}, "ab": {"type": "null"}},
            "propertyNames": {"pattern": "^[a-z]+$"},
        },
        ['{"ab":null}', '{"x":1}'],
        ['{"ab":1}', '{"no-name":1}', '{"X":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1,"c":2}'],
        ["{}", '{"a":1,"b":1}'],
    ),
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {name: {"type": "string"}},
                    "additionalProperties": False,
                }
                for name in ("env", "file")
            ]
        },
        ['{"env":"a"}', '{"file":"a"}'],
        ["{}", '{"env":1}'],
    ),
    (
        {
            "oneOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
            ]
        },
        ['"a"', '["a","b"]', "[1,2]"],
        ["[]", '["a",1]'],
    ),
    (
        {"oneOf": [{"type": "number", "maximum": 5}, {"type": "integer", "minimum": 3}]},
        ["2.5", "6"],
        ["4", "5"],
    ),
    ({"type": ["integer", "null"], "not": {"enum": [0, 2]}}, ["-1", "1", "3", "null"], ["0", "2"]),
    (
        {
            "type": "object",
            "properties": {"age": {"type": "integer"}, "guardian": {"type": "string"}},
            "required": ["age"],
            "if": {"properties": {"age": {"exclusiveMaximum": 18}}},
            "then": {"required": ["guardian"]},
        },
        ['{"age":18}', '{"age":7,"guardian":"a"}'],
        ['{"age":7}', '{"age":17}'],
    ),
    (
        {
            "type": "object",
            "properties": {"id": {"type": "string"}},
            "required": ["type"],
            "oneOf": [
                {"properties": {"type": {"enum": [kind]}, "of": {"pattern": f"^{kind}"}}}
                for kind in ("a", "b")
            ],
        },
        ['{"type":"a"}', '{"type":"b","of":"bc"}'],
        ['{"of":"a"}', '{"type":"b","of":"a"}'],
    ),
    (
        {
            "$id": "https://x.org/a/b.json",
            "items": {"$ref": "b.json#/$defs/c"},
            "$defs": {
                "c": {"$id": "#c", "type": "array", "items": {"$ref": "#/$defs/d"}},
                "d": {"const": 1},
            },
        },
        ["[[1]]"],
        ["[1]", "[[2]]"],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "minProperties": 1},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}', '{"a":1,"c":2}', '{"c":"x"}'],
        ["{}", '{"a":"x"}'],
    ),
    (
        {
            "properties": {"a": {"type": "integer"}, "b": {}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 2,
        },
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}', "5"],
        ["{}", '{"c":1}', '{"a":"x"}'],
    ),
    (True, ["[1, null]"], [" 1"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), TAKEN)
def test_what_is_taken(
    grammars: Grammars, tokenizer: Any, schema: Any, valid: Any, invalid: Any
) -> None:
    grammar = grammars.compile({"json": schema})

    def fits(text: str) -> bool:
        inner = grammars.matcher(grammar, frozenset()).inner
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return inner.try_consume_tokens(token_ids) == len(token_ids) and inner.is_accepting()

    assert [text for text in valid if not fits(text)] == []
    assert [text for text in invalid if fits(text)] == []


def values_like(schema: Any, rng: random.Random) -> Iterator[Any]:
    """Values that may fit a schema, or nearly."""
    yield from (None, True, False, 0, 7, 2.5, "", "ab", "é", [], [1], {}, {"a": 1})
    for part in [*_parts(schema)]:
        yield from part.get("enum", ())
        yield part.get("const")
        names = [*part.get("properties", {})]
        for _ in range(5):
            chosen = rng.sample(names, rng.randint(0, len(names)))
            yield {name: rng.choice([1, "a", None, True, [], {}]) for name in chosen}


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, dict | list):
        for each in schema.values() if isinstance(schema, dict) else schema:
            yield from _parts(each)


def test_a_value_fits_a_schema_or_its_negation_and_never_both() -> None:
    rng, num_values = random.Random(0), 0
    for schema in filter(is_taken, map(random_schema, range(60))):
        negations = Negation(
            lambda target, root=schema: resolve(root, target),
            lambda part: part,
            draft=10,
        )
        negation, lost = negations.of(schema), negations.lost(schema)
        assert negation is not None
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        excludes = jsonschema.Draft202012Validator(negation).is_valid
        for value in values_like(schema, rng):
            if excludes(value):
                num_values += 1
                assert not is_valid(value), (schema, value)
            elif not is_valid(value):
                is_whole = type(value) is int
                is_of_type = jsonschema.Draft202012Validator({"type": [*lost]}).is_valid
                assert lost, (schema, value)
                assert "integer" in lost if is_whole else is_of_type(value), (schema, value)
    assert num_values > 600


def is_taken(schema: Any) -> bool:
    try:
        enforceable(schema)
    except RequestError:
        return False
    return True


def resolve(root: Any, target: str) -> Any:
    for step in target.split("/")[1:]:
        root = root[unquote(step).replace("~1", "/").replace("~0", "~")]
    return root


def new_masks(num_rows: int, num_words: int) -> np.ndarray:
    return np.empty((num_rows, num_words), np.int32)


class Walker:
    """Writes texts at random that a grammar takes, and ends them when it can after a while."""

    def __init__(self, grammars: Grammars, tokenizer: Any) -> None:
        self.grammars, self.decode = grammars, tokenizer.decode
        texts = [tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)]
        self.weights = 1.0 / (1 + np.array([len(text) for text in texts])) ** 2
        self.closing = [texts.index(text) for text in '}]",']

    def walk(self, schema: Any, seed: int, max_tokens: int = 200) -> str | None:
        """Return a text, or None if it did not end."""
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

    def _mask(self, matcher: Matcher) -> np.ndarray:
        while True:  # a busy machine may be late with it, and nobody asks again before it is there
            masks, late = self.grammars.finish(self.grammars.begin([matcher], new_masks))
            if not late:
                return masks[0]
            while not matcher.is_ready:
                self.grammars.wait([matcher])

    def _choose(
        self, allowed: np.ndarray, bits: np.ndarray, wants_end: bool, rng: np.random.Generator
    ) -> int:
        closing = [token_id for token_id in (EOS, *self.closing) if bits[token_id]]
        if wants_end and closing and rng.random() < 0.8:
            return closing[0]
        some = allowed[rng.integers(0, len(allowed), 64)]
        shares = np.cumsum(self.weights[some])
        return int(some[np.searchsorted(shares, rng.random() * shares[-1])])


@pytest.mark.slow
@pytest.mark.endurance
def test_every_random_text_is_valid(
    grammars: Grammars, tokenizer: Any, count: Callable[[int], int]
) -> None:
    walker, num_schemas = Walker(grammars, tokenizer), count(2000)
    num_refused = num_texts = 0
    for seed in range(num_schemas):
        schema = random_schema(10_000 + seed)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        try:
            texts = [walker.walk(schema, seed), walker.walk(schema, -seed % 2**32)]
        except RequestError:
            num_refused += 1
            continue
        for text in texts:
            if text is not None:
                num_texts += 1
                assert validator.is_valid(json.loads(text)), (seed, text)
    assert num_refused <= num_schemas / 4
    assert num_texts >= num_schemas / 2
