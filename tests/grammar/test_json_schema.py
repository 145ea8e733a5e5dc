"""JSON schemas are refused by name or enforced whole: no text that a grammar takes is invalid."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from nanovllm.checkpoint.find import find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.errors import RequestError
from nanovllm.grammar.json_schema import enforceable
from nanovllm.grammar.matching import Grammars, Matcher, Vocabulary
from tests.json_schemas import random_schema

VOCAB_SIZE, EOS = 49152, 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(find_checkpoint("smollm2", need_weights=False))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    vocabulary = Vocabulary(tokenizer, frozenset({EOS}))
    return Grammars(lambda: vocabulary, VOCAB_SIZE)


REFUSED: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("not", {"properties": {"a": {"not": {}}}}),
    ("if", {"if": True, "then": {"const": 1}}),
    ("contains", {"contains": {"type": "null"}}),
    ("propertyNames", {"propertyNames": {"pattern": "a"}}),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"dependentSchemas": {"a": {"minProperties": 2}}}),
    ("dependencies", {"dependencies": {"a": ["b"]}}),
    ("unevaluatedProperties", {"unevaluatedProperties": False}),
    ("unevaluatedItems", {"unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("$ref", {"$ref": "other.json#/a"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("$ref", {"$ref": "#name"}),
    ("$ref", {"$ref": "#"}),
    ("$ref", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ("$id", {"properties": {"a": {"$id": "x", "$ref": "#/b"}}, "b": {}}),
    ("format", {"type": "string", "format": "colour"}),
    ("pattern", {"pattern": "(?=a)b"}),
    ("pattern", {"pattern": "\\bword"}),
    ("pattern", {"pattern": "^\\D+$"}),
    ("pattern", {"pattern": "[^\\w]"}),
    ("pattern", {"pattern": "[a-z&&[^b]]"}),
    ("pattern", {"pattern": "(a)\\1"}),
    ("pattern", {"pattern": "("}),
    ("patternProperties", {"patternProperties": {"(?!a)": {}}}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("oneOf", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
    ("multipleOf", {"type": "number", "multipleOf": 0.01}),
    ("minProperties", {"type": "object", "minProperties": 2}),
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
    (True, ["[1, null]"], [" 1"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), TAKEN)
def test_what_is_taken(
    grammars: Grammars, tokenizer: Any, schema: Any, valid: Any, invalid: Any
) -> None:
    grammar = grammars.compile({"json": schema})

    def is_taken(text: str) -> bool:
        inner = grammars.matcher(grammar, frozenset()).inner
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return inner.try_consume_tokens(token_ids) == len(token_ids) and inner.is_accepting()

    assert [text for text in valid if not is_taken(text)] == []
    assert [text for text in invalid if is_taken(text)] == []


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
        while True:  # a busy machine may be late with it
            masks, late = self.grammars.masks([matcher])
            if not late:
                return masks[0]

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
