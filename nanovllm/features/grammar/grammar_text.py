"""Translate the `structured_outputs` of a request into llguidance's grammar format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.errors import GrammarError
from nanovllm.features.grammar.json_schema import Schema, enforceable
from nanovllm.features.grammar.limits import check_schema, check_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Whitespace is bounded so that a model cannot emit it forever. Without \uXXXX escapes a property
# name has exactly one spelling, so llguidance always recognizes the properties of the schema.
JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n]{1,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_text(asked: Mapping[str, Any], tokenizer: LLTokenizer) -> str:
    """Return `structured_outputs` in llguidance's JSON format: a list of grammars, root first."""
    for key in ("after", "opened_by"):
        check_text(asked.get(key, ""))
    grammars = [_constraint(asked)]
    if "after" in asked:
        before = "before GAP?" if "json_schema" in grammars[0] else "before"
        rules = _before_rule(asked["after"], tokenizer)
        if "opened_by" in asked:
            before = f"(opening {before})?"
            rules += f"\n{_opening_rule(asked['opened_by'], tokenizer)}"
        lark = f"start: {before} @answer\nGAP: /\\n{{1,2}}/\n{rules}"
        grammars = [{"lark_grammar": lark}, {"name": "answer", **grammars[0]}]
    return json.dumps({"grammars": grammars})


def enforced_json(schema: Schema) -> dict[str, Any]:
    """Return the schema in a form that llguidance fully enforces, with the required options."""
    check_schema(schema)
    return {**enforceable(schema), "x-guidance": JSON_OPTIONS}


def _before_rule(after: str, tokenizer: LLTokenizer) -> str:
    """Return the rule for free text up to and including `after`, before the constrained output."""
    literal = _literal(after, tokenizer)
    if literal.startswith("<"):
        return f"before: /(?s:.*)/ {literal}"
    return f"before[suffix={literal}]: /(?s:.*)/"


def _opening_rule(opened_by: str, tokenizer: LLTokenizer) -> str:
    """Return the rule for `opened_by`, which has priority over output that starts the same way."""
    literal = _literal(opened_by, tokenizer)
    return f"opening{'' if literal.startswith('<') else '[lazy]'}: {literal}"


def _literal(text: str, tokenizer: LLTokenizer) -> str:
    """Return a Lark literal for a text: the id if it is a special token, else a quoted string."""
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]):
        return f"<[{token_ids[0]}]>"
    return json.dumps(text)


def _constraint(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar of the constrained output itself."""
    if "json" in asked or "json_object" in asked:
        return {"json_schema": enforced_json(asked.get("json", {"type": "object"}))}
    check_text("".join(asked.get("choice", ())) + asked.get("grammar", asked.get("regex", "")))
    if "grammar" in asked:
        return {"lark_grammar": asked["grammar"]}
    if "choice" in asked:
        choices = ["".join(map(_escaped, text)) for text in asked["choice"]]
        return {"lark_grammar": f"start: /{'|'.join(choices)}/"}
    from llguidance import regex_to_lark

    regex = asked["regex"]
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would drop the last backslash
        raise GrammarError("cannot be enforced: the regex ends in a backslash")
    return {"lark_grammar": f"start: /{regex_to_lark(regex, '')}/"}


def _escaped(char: str) -> str:
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"
