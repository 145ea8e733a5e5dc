"""Compile grammars and compute token bitmasks with llguidance.

llguidance is imported when a request first needs it. A bitmask has one bit per token: bit
i % 32 of word i // 32 is set if token i may come next.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.grammar import Allocate
from nanovllm.engine.input_processor import Vocabulary
from nanovllm.engine.step import IntColumn
from nanovllm.errors import GrammarError
from nanovllm.features.grammar.grammar_text import grammar_text
from nanovllm.features.grammar.limits import is_risky, run_bounded, try_compiling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

NUM_CACHED = 32  # number of compiled grammars kept for later requests
NUM_TRIED = 4  # number of tokens matched as a test when a grammar is compiled
SLOW_MASK = 0.005  # CPU seconds; the bitmasks of slower grammars are computed in other threads
MAX_STEP = 0.01  # CPU seconds per step for bitmasks; other threads compute the rest
# Limits of llguidance, with their approximate cost. A grammar that exceeds them at compile time is
# rejected; one that exceeds them later ends its sequence with an error.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms to compile
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 100_000,  # 7 ms per bitmask
    "step_max_items": 50_000,  # 3 ms per bitmask
    "max_lexer_states": 50_000,  # 100 MB
}


@dataclass(frozen=True, slots=True)
class GuidanceGrammar:
    """A grammar in llguidance's format, and its compiled form, which is not pickled."""

    text: str
    compiled: Compiled | None = field(repr=False, compare=False, default=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return GuidanceGrammar, (self.text,)  # the receiving process compiles it again


@dataclass(slots=True)
class Compiled:
    """A compiled grammar: a matcher in its initial state, from which others are copied."""

    start: LLMatcher
    first_mask: IntColumn
    is_slow: bool = False


class GuidanceMatcher:
    """Tracks the output of one sequence; its next bitmask may be computed in another thread."""

    compiled: Compiled
    inner: LLMatcher

    def __init__(self, stop_token_ids: frozenset[int]) -> None:
        self.stop_token_ids = stop_token_ids
        self.mask: IntColumn | None = None  # the next bitmask, if computed ahead
        self.job: Future[None] | None = None  # computes `mask`, or compiles the grammar

    def begin(self, compiled: Compiled) -> None:
        self.compiled, self.inner = compiled, compiled.start.deep_copy()
        self.mask = compiled.first_mask

    @property
    def is_ready(self) -> bool:
        return self.job is None or self.job.done()

    def finishes(self, token_id: int) -> bool:
        """Consume a token other than a stop token; return True if the output is complete."""
        self.mask = self.job = None
        self.inner.consume_token(token_id)
        return self.inner.is_stopped() and not self.inner.is_error()

    def num_allowed(self, drafts: list[int]) -> int:
        """Return how many leading draft tokens are allowed; 0 if bitmasks are slow or pending."""
        if self.job is not None or self.compiled.is_slow:
            return 0
        stop = next((i for i, each in enumerate(drafts) if each in self.stop_token_ids), None)
        return self.inner.validate_tokens(drafts[:stop])


@dataclass(frozen=True, slots=True)
class GuidanceContext:
    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    limits: LLParserLimits
    described: Mapping[str, Any]  # the above as JSON values, for the child of `try_compiling`


class GuidanceEngine:
    """Compiles grammars (from any thread) and computes bitmasks (for the engine's thread)."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size  # `load` is called on first use: it is slow
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        # A compiled grammar has up to two keys: the request as JSON, and its llguidance text.
        self._cache: OrderedDict[str, GuidanceGrammar] = OrderedDict()
        # Threads for compiling grammars, and for bitmasks that would delay a step.
        self._threads = ThreadPoolExecutor(2, "nanovllm-grammars")
        self._context: GuidanceContext | None = None
        self._memory: IntColumn | None = None  # persistent buffer; CUDA graphs read it in place

    def compile(self, asked: Mapping[str, Any]) -> GuidanceGrammar:
        """Compile `structured_outputs`; raise GrammarError if it cannot be fully enforced."""
        key = _key(asked)
        grammar = self._cached(key)
        if grammar is None:
            context = self._get_context()
            text = run_bounded(grammar_text, asked, context.tokenizer)
            if is_risky(text) and self._cached(text) is None:
                try_compiling(text, context.described)
            grammar = self._remember(key, self._compiled(text))
        return grammar

    def is_compiled(self, asked: Mapping[str, Any]) -> bool:
        return self._cached(_key(asked)) is not None

    def matcher(self, grammar: GuidanceGrammar, stop_token_ids: frozenset[int]) -> GuidanceMatcher:
        """Return a matcher; it is not ready while its grammar is still being compiled."""
        matcher = GuidanceMatcher(stop_token_ids)
        if grammar.compiled is not None:
            matcher.begin(grammar.compiled)
        else:
            matcher.job = self._threads.submit(self._begin_later, matcher, grammar.text)
        return matcher

    def masks(
        self, rows: Sequence[tuple[GuidanceMatcher, list[int]]], allocate: Allocate
    ) -> tuple[IntColumn, list[int]]:
        """Return the bitmasks of all rows, and the indices of rows whose bitmasks are not ready.

        A row is a matcher and its draft tokens. It has a bitmask for the next token, and one for
        the token after each draft token. The next call overwrites the bitmasks.
        """
        num_masks = sum(1 + len(drafts) for _, drafts in rows)
        masks, late, row = self._memory_for(num_masks, allocate), [], 0
        eos, address = self._get_context().eos_token_ids, masks.ctypes.data
        now = time.thread_time()  # CPU time: on a busy machine, wall time is long for any grammar
        end = now + MAX_STEP
        for index, (matcher, drafts) in enumerate(rows):
            if matcher.mask is not None and not drafts:
                masks[row] = matcher.mask
                allow_stops(matcher, masks[row], eos)
            elif not drafts and (matcher.compiled.is_slow or now > end):
                matcher.job = self._threads.submit(self._compute_ahead, matcher)
                late.append(index)
            else:
                inner = matcher.inner
                if drafts:  # advance a copy: its errors do not affect the sequence
                    matcher.inner = inner.deep_copy()
                for place, draft in enumerate([*drafts, None], row):
                    compute_mask(matcher, masks[place], address + place * masks.strides[0])
                    allow_stops(matcher, masks[place], eos)
                    if draft is not None:
                        matcher.inner.consume_token(draft)
                matcher.inner = inner
                before, now = now, time.thread_time()
                matcher.compiled.is_slow = now - before > SLOW_MASK * (1 + len(drafts))
            row += 1 + len(drafts)
        return masks, late

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_later(self, matcher: GuidanceMatcher, text: str) -> None:
        # If compilation fails, this all-zero bitmask ends the sequence with an error.
        matcher.mask = np.zeros(self._num_words, np.int32)
        compiled = self._compiled(text).compiled
        assert compiled is not None
        matcher.begin(compiled)

    def _compute_ahead(self, matcher: GuidanceMatcher) -> None:
        mask = np.empty(self._num_words, np.int32)
        compute_mask(matcher, mask, mask.ctypes.data)
        matcher.mask = mask

    def _compiled(self, text: str) -> GuidanceGrammar:
        grammar = self._cached(text)
        if grammar is None:
            self._get_context()  # load the tokenizer before the time limit of compilation starts
            grammar = self._remember(text, GuidanceGrammar(text, run_bounded(self._compile, text)))
        return grammar

    def _cached(self, key: str) -> GuidanceGrammar | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _remember(self, key: str, grammar: GuidanceGrammar) -> GuidanceGrammar:
        with self._lock:
            self._cache[key] = grammar
            if len(self._cache) > 2 * NUM_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _memory_for(self, num_rows: int, allocate: Allocate) -> IntColumn:
        if self._memory is None or len(self._memory) < num_rows:
            self._memory = allocate(1 << (num_rows - 1).bit_length(), self._num_words)
        return self._memory[:num_rows]

    def _compile(self, text: str) -> Compiled:
        from llguidance import LLMatcher

        context = self._get_context()
        matcher = LLMatcher(context.tokenizer, text, log_level=0, limits=context.limits)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise refusal("; ".join(warnings))
        first_mask, *_ = self._first_masks(matcher.deep_copy())
        return Compiled(matcher, first_mask)

    def _first_masks(self, matcher: LLMatcher) -> Iterator[IntColumn]:
        """Match a few allowed tokens and yield the bitmask before each; raise if one fails.

        Some grammars fail only after the first token.
        """
        for _ in range(NUM_TRIED):
            mask = np.zeros(self._num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                reason = matcher.get_error()
                raise refusal(f"no output matches it, or matching takes too much work: {reason}")
            yield mask
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            bits[list(self._get_context().eos_token_ids)] = 0
            if not bits.any() or not matcher.consume_token(int(bits.argmax())):
                return

    def _get_context(self) -> GuidanceContext:
        with self._lock:
            if self._context is None:
                self._context = self._create_context()
            return self._context

    def _create_context(self) -> GuidanceContext:
        vocabulary = self._load()
        if vocabulary.tokenizer is None:
            raise GrammarError("needs a tokenizer; leave out skip_tokenizer_init=True")
        try:
            from llguidance import LLParserLimits, LLTokenizer
        except ImportError as error:
            raise GrammarError("needs llguidance: pip install llguidance") from error
        text, eos = vocabulary.tokenizer.backend_tokenizer.to_str(), vocabulary.eos_token_ids
        try:
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(eos) or None)
        except ValueError as error:
            raise GrammarError(f"does not work with this model's tokenizer: {error}") from error
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        described = {"tokenizer": text, "vocab_size": self._vocab_size, "limits": LIMITS}
        described["eos"] = sorted(eos) or None
        return GuidanceContext(tokenizer, eos, limits, described)


def _key(asked: Mapping[str, Any]) -> str:
    """Return `structured_outputs` as JSON; "" if too deeply nested, which fails to compile."""
    try:
        return json.dumps(asked)
    except RecursionError:
        return ""


def compute_mask(matcher: GuidanceMatcher, mask: IntColumn, address: int) -> None:
    """Write the next bitmask to `mask`; `address` is `mask.ctypes.data`, which is slow to get.

    A bitmask that allows no token ends the sequence with an error.
    """
    try:
        matcher.inner.unsafe_compute_mask_ptr(address, mask.nbytes)
    except Exception:  # a panic in llguidance must not end the engine
        logger.exception("llguidance failed to compute a bitmask")
        mask[:] = 0
    if matcher.inner.is_error():
        mask[:] = 0


def allow_stops(matcher: GuidanceMatcher, mask: IntColumn, eos: frozenset[int]) -> None:
    """Allow the sequence's stop tokens only where the output may end.

    EOS tokens that do not stop the sequence are allowed only if no other token is.
    """
    stops = matcher.stop_token_ids
    if stops == eos or not mask.any():
        return
    if not matcher.inner.is_accepting():  # the output cannot end here; llguidance has masked EOS
        for token_id in stops:
            allow(mask, token_id, False)
        return
    before = mask.copy()
    for token_id in eos | stops:
        allow(mask, token_id, token_id in stops)
    if not mask.any():
        mask[:] = before


def allow(mask: IntColumn, token_id: int, is_allowed: bool) -> None:
    bit = np.uint32(1 << token_id % 32)
    words = mask.view(np.uint32)
    words[token_id // 32] &= ~bit
    if is_allowed:
        words[token_id // 32] |= bit


def refusal(reason: str) -> GrammarError:
    if "coerce_one_of" in reason:  # llguidance suggests an option that requests cannot set
        reason = "the options of 'oneOf' are not provably disjoint"
    if reason.startswith("circular references"):
        reason = "a '$ref' in 'oneOf' or next to other keywords leads back to itself; try 'anyOf'"
    if reason.startswith("regex parse error"):
        reason = f"a 'pattern' is not a regular expression: {reason}"
    return GrammarError(f"cannot be enforced: {reason.strip()}")
