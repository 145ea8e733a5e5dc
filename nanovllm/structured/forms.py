"""Translate `structured_outputs` of a request to llguidance's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.errors import GrammarError
from nanovllm.structured.json_schema import Schema, enforceable
from nanovllm.structured.limits import check_schema, check_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Spaces are bounded, so that a model cannot write them forever. Without \uXXXX a name has one
# spelling only, and is known for one of the schema's properties wherever it is one.
JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n]{1,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_text(asked: Mapping[str, Any], tokenizer: LLTokenizer) -> str:
    """Return a request in llguidance's own form: a list of grammars, the first of which counts."""
    for key in ("after", "opened_by"):
        check_text(asked.get(key, ""))
    grammars = [_answer(asked)]
    if "after" in asked:
        before = "before GAP?" if "json_schema" in grammars[0] else "before"
        rules = _before(asked["after"], tokenizer)
        if "opened_by" in asked:
            before = f"(opening {before})?"
            rules += f"\n{_opening(asked['opened_by'], tokenizer)}"
        lark = f"start: {before} @answer\nGAP: /\\n{{1,2}}/\n{rules}"
        grammars = [{"lark_grammar": lark}, {"name": "answer", **grammars[0]}]
    return json.dumps({"grammars": grammars})


def enforced_json(schema: Schema) -> dict[str, Any]:
    """Return a schema that llguidance enforces whole, with the options that this takes."""
    check_schema(schema)
    return {**enforceable(schema), "x-guidance": JSON_OPTIONS}


def _before(after: str, tokenizer: LLTokenizer) -> str:
    """The rule for all that comes before an answer, up to a text or a special token."""
    literal = _literal(after, tokenizer)
    if literal.startswith("<"):
        return f"before: /(?s:.*)/ {literal}"
    return f"before[suffix={literal}]: /(?s:.*)/"


def _opening(opened_by: str, tokenizer: LLTokenizer) -> str:
    """The rule for what opens that; a text counts at once, even if an answer could begin so."""
    literal = _literal(opened_by, tokenizer)
    return f"opening{'' if literal.startswith('<') else '[lazy]'}: {literal}"


def _literal(text: str, tokenizer: LLTokenizer) -> str:
    """A text as a grammar has it: a special token by its id, any other in quotes."""
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]):
        return f"<[{token_ids[0]}]>"
    return json.dumps(text)


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    if "json" in asked or "json_object" in asked:
        return {"json_schema": enforced_json(asked.get("json", {"type": "object"}))}
    check_text("".join(asked.get("choice", ())) + asked.get("grammar", asked.get("regex", "")))
    if "grammar" in asked:
        return {"lark_grammar": asked["grammar"]}
    if "choice" in asked:
        texts = ["".join(map(_escaped, text)) for text in asked["choice"]]
        return {"lark_grammar": f"start: /{'|'.join(texts)}/"}
    from llguidance import regex_to_lark

    regex = asked["regex"]
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance drops the last one
        raise GrammarError("cannot be enforced: the regex ends in a backslash")
    return {"lark_grammar": f"start: /{regex_to_lark(regex, '')}/"}


def _escaped(char: str) -> str:
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"
