"""Grammars: which answers a request allows, compiled and followed token by token by llguidance.

llguidance is imported when a request needs it. A mask has a bit for each token: bit i % 32 of word
i // 32 says whether token i may come next.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.json_schema import enforceable
from nanovllm.engine.step import IntColumn
from nanovllm.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerBase

NUM_CACHED = 32  # grammars that are kept for requests to come
# Of work, each with what it takes: a grammar that needs more is refused, or ends its answer.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms to compile
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 100_000,  # 7 ms a mask
    "step_max_items": 50_000,  # 3 ms a mask
    "max_lexer_states": 50_000,  # 100 MB
}
# Spaces are bounded, so that a model cannot write them forever. Without \uXXXX a name has one
# spelling only, and is known for one of the schema's properties wherever it is one.
JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n]{1,16}",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's own form, and a matcher of it that stays at its beginning."""

    text: str
    matcher: LLMatcher | None = field(repr=False, compare=False, default=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Grammar, (self.text,)  # another process compiles it for itself


class Matcher:
    """Follows the answer of one sequence."""

    def __init__(self, inner: LLMatcher, stop_token_ids: frozenset[int]) -> None:
        self.inner = inner
        self.stop_token_ids = stop_token_ids

    def finishes(self, token_id: int) -> bool:
        """Follow a token that is no stop token; True when nothing can come after it."""
        self.inner.consume_token(token_id)
        return self.inner.is_stopped() and not self.inner.is_error()


class Grammars:
    """Compiles grammars, in any thread, and computes masks, in that of the engine."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._tools: tuple[LLTokenizer, LLExecutor, LLParserLimits] | None = None

    def compile(self, asked: Mapping[str, Any]) -> Grammar:
        """Compile what a request asks for; raises RequestError if it cannot be enforced whole."""
        self._get_tools()  # or say at once what is missing
        text = grammar_text(asked)
        with self._lock:
            grammar = self._cache.pop(text, None)
        if grammar is None:
            grammar = Grammar(text, self._compile(text))
        with self._lock:
            self._cache[text] = grammar
            if len(self._cache) > NUM_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def matcher(self, grammar: Grammar, stop_token_ids: frozenset[int]) -> Matcher:
        inner = grammar.matcher or self._compile(grammar.text)
        return Matcher(inner.deep_copy(), stop_token_ids)

    def masks(self, matchers: list[Matcher | None]) -> IntColumn:
        """Return a mask for each matcher; None, for a sequence that has ended, allows all."""
        _, executor, _ = self._get_tools()
        num_words = -(-self._vocab_size // 32)
        masks = np.full((len(matchers), num_words), -1, np.int32)
        rows = [(each.inner, row) for row, each in enumerate(matchers) if each is not None]
        executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * num_words, len(masks))
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher is None:
                continue
            if matcher.inner.is_error():
                mask[:] = 0  # no token: the sequence ends with an error
            elif matcher.stop_token_ids != self._eos_token_ids:
                self._allow_stops(matcher, mask)
        return masks

    def _allow_stops(self, matcher: Matcher, mask: IntColumn) -> None:
        """Allow the sequence's own stop tokens where the answer may end; the model's, if ignored,
        only where it must."""
        is_accepting = matcher.inner.is_accepting()
        given = mask.copy()
        for token_id in self._eos_token_ids | matcher.stop_token_ids:
            allow(mask, token_id, is_accepting and token_id in matcher.stop_token_ids)
        if not mask.any():
            mask[:] = given

    def _compile(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer, _, limits = self._get_tools()
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise refusal("; ".join(warnings))
        start = matcher.deep_copy()
        start.compute_bitmask()
        if start.is_error():
            raise refusal(f"no answer fits it ({start.get_error()})")
        return matcher

    def _get_tools(self) -> tuple[LLTokenizer, LLExecutor, LLParserLimits]:
        with self._lock:
            if self._tools is None:
                self._tools = self._make_tools()
            return self._tools

    def _make_tools(self) -> tuple[LLTokenizer, LLExecutor, LLParserLimits]:
        if self._tokenizer is None:
            raise RequestError("structured_outputs need a tokenizer, not skip_tokenizer_init=True")
        try:
            from llguidance import LLExecutor, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs need the package llguidance: pip install llguidance"
            ) from error
        backend = self._tokenizer.backend_tokenizer
        eos = sorted(self._eos_token_ids) or None
        try:
            tokenizer = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs do not work with this model's tokenizer: {error}"
            ) from error
        num_threads = max((os.cpu_count() or 1) - 1, 1)
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        return tokenizer, LLExecutor(min(num_threads, 16)), limits


def allow(mask: IntColumn, token_id: int, is_allowed: bool) -> None:
    bit = np.uint32(1 << token_id % 32)
    words = mask.view(np.uint32)
    words[token_id // 32] &= ~bit
    if is_allowed:
        words[token_id // 32] |= bit


def grammar_text(asked: Mapping[str, Any]) -> str:
    """Return a request in llguidance's own form: a list of grammars, the first of which counts."""
    answer = _answer(asked)
    grammars = [answer]
    if "after" in asked:
        lark = f"start: before @answer\nbefore[suffix={json.dumps(asked['after'])}]: /(?s:.*)/"
        grammars = [{"lark_grammar": lark}, {"name": "answer", **answer}]
    return json.dumps({"grammars": grammars})


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    if "json" in asked or "json_object" in asked:
        schema = enforceable(asked.get("json", {"type": "object"}))
        return {"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}
    if "grammar" in asked:
        return {"lark_grammar": asked["grammar"]}
    if "choice" in asked:
        texts = [json.dumps(text, ensure_ascii=False) for text in asked["choice"]]
        return {"lark_grammar": "start: " + " | ".join(texts)}
    from llguidance import LLMatcher

    answer: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(asked["regex"]))["grammars"][0]
    return {"lark_grammar": answer["lark_grammar"]}


def refusal(reason: str) -> RequestError:
    return RequestError(f"structured_outputs cannot be enforced: {reason.strip()}")
