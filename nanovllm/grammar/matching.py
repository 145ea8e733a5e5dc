"""Grammars: which answers a request allows, compiled and followed token by token by llguidance.

llguidance is imported when a request needs it. A mask has a bit for each token: bit i % 32 of word
i // 32 says whether token i may come next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.step import IntColumn
from nanovllm.errors import GrammarError
from nanovllm.grammar.forms import grammar_text
from nanovllm.grammar.limits import is_risky, run_bounded, trial_slot, try_compiling

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerBase

NUM_CACHED = 32  # grammars that are kept for requests to come
NUM_TRIED = 4  # tokens, before a grammar is taken
MAX_WAIT = 0.01  # seconds that a batch waits for masks; rows without one run again later
MAX_THREADS = 4  # that compute masks: 64 rows take one of them 0.6 ms
# Of work, each with what it takes: a grammar that needs more is refused, or ends its answer.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms to compile
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 100_000,  # 7 ms a mask
    "step_max_items": 50_000,  # 3 ms a mask
    "max_lexer_states": 50_000,  # 100 MB
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's own form, and what comes of compiling it."""

    text: str
    compiled: Compiled | None = field(repr=False, compare=False, default=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Grammar, (self.text,)  # another process compiles it for itself


@dataclass(frozen=True, slots=True)
class Compiled:
    """Matchers that stay at the beginning, to be copied.

    The copies of one share a lock, so that only one thread at a time can work on them.
    """

    starts: list[LLMatcher]
    first_mask: IntColumn
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the copies


class Matcher:
    """Follows the answer of one sequence. Its next mask may be on its way in another thread."""

    inner: LLMatcher
    start: LLMatcher  # whose copy it is

    def __init__(self, stop_token_ids: frozenset[int]) -> None:
        self.stop_token_ids = stop_token_ids
        self.mask: IntColumn | None = None  # None: not asked for yet
        self.has_own_memory = False  # for its mask, not that of the step's
        self.job: Future[None] | None = None  # what computes it
        self.seconds: float | None = 0.0  # what masks take; None: maybe long
        # Whether the engine's own thread may compute its masks; None: not tried in another yet.
        self.is_quick: bool | None = None

    def begin(self, compiled: Compiled) -> None:
        index = next(compiled.numbers) % len(compiled.starts)
        self.start, self.mask = compiled.starts[index], compiled.first_mask
        self.inner = self.start.deep_copy()

    @property
    def is_ready(self) -> bool:
        return self.mask is not None and (self.job is None or self.job.done())

    @property
    def is_slow(self) -> bool:
        return self.seconds is not None and self.seconds > MAX_WAIT

    def finishes(self, token_id: int) -> bool:
        """Follow a token that is no stop token; True when nothing can come after it."""
        self.mask = self.job = None
        self.inner.consume_token(token_id)
        return self.inner.is_stopped() and not self.inner.is_error()


Allocate = Callable[[int, int], IntColumn]  # of rows and words


@dataclass(frozen=True, slots=True)
class BegunMasks:
    masks: IntColumn  # [masked rows, words]
    rows: list[tuple[int, Matcher]]


@dataclass(frozen=True, slots=True)
class Tools:
    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    limits: LLParserLimits
    num_threads: int
    described: Mapping[str, Any]  # how another process makes the tokenizer
    executor: LLExecutor  # computes many masks at a time, in as many threads
    # Slow grammars have threads of their own, so that they never keep the others from one.
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "nanovllm-masks")
    )
    slow_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, "nanovllm-slow-masks")
    )


class Grammars:
    """Compiles grammars, in any thread, and computes masks, for that of the engine."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Compiled] = OrderedDict()
        self._known: OrderedDict[str, str] = OrderedDict()  # a request as JSON, its grammar's text
        self._loading = ThreadPoolExecutor(1, "nanovllm-grammars")
        self._tools: Tools | None = None
        self._memory: IntColumn | None = None  # of masks
        self._has_late = False  # whether some are still being written there

    def compile(self, asked: Mapping[str, Any]) -> Grammar:
        """Compile what a request asks for; raises GrammarError if it cannot be enforced whole."""
        if (known := self._find(asked)) is not None:
            return known
        tools = self._get_tools()
        text = run_bounded(grammar_text, asked, tools.tokenizer)
        must_try = is_risky(text)
        with trial_slot() if must_try else contextlib.nullcontext():
            if must_try and text not in self._cache:
                try_compiling(text, tools.described)
            grammar = Grammar(text, self._compiled(text))
        if (key := _key(asked)) is not None:
            with self._lock:
                self._known[key] = text
                if len(self._known) > NUM_CACHED:
                    self._known.popitem(last=False)
        return grammar

    def is_compiled(self, asked: Mapping[str, Any]) -> bool:
        return self._find(asked) is not None

    def _find(self, asked: Mapping[str, Any]) -> Grammar | None:
        """Return the grammar that an equal request compiled before, or None."""
        if (key := _key(asked)) is None:
            return None
        with self._lock:
            text = self._known.get(key, "")
            compiled = self._cache.get(text)
        return None if compiled is None else Grammar(text, compiled)

    def matcher(self, grammar: Grammar, stop_token_ids: frozenset[int]) -> Matcher:
        """Return a matcher; where the grammar came from another process it is not ready at once."""
        matcher, compiled = Matcher(stop_token_ids), grammar.compiled
        if compiled is None:
            matcher.job = self._loading.submit(self._begin_later, matcher, grammar.text)
            return matcher
        matcher.begin(compiled)
        if len(compiled.starts) < self._get_tools().num_threads:
            self._loading.submit(self._add_start, compiled, grammar.text)
        return matcher

    def begin(self, matchers: list[Matcher | None], allocate: Allocate) -> BegunMasks:
        """Let a mask for each matcher be computed; None, of a sequence that ended, allows all.

        The next call may use the same memory.
        """
        masks = self._memory_for(len(matchers), allocate)
        rows = [(row, each) for row, each in enumerate(matchers) if each is not None]
        if len(rows) < len(matchers):
            masks[[row for row, each in enumerate(matchers) if each is None]] = -1
        quick: list[tuple[int, Matcher]] = []
        others: list[tuple[int, Matcher]] = []
        for row, matcher in rows:
            if matcher.mask is not None:  # it was computed earlier
                masks[row] = matcher.mask
            else:
                (quick if matcher.is_quick else others).append((row, matcher))
        if others:
            self._begin(others, masks)
        if quick:
            self._fill_now(quick, masks)
        return BegunMasks(masks, rows)

    def finish(self, begun: BegunMasks) -> tuple[IntColumn, list[int]]:
        """Return the masks, and which of them are late: those mean nothing yet."""
        masks, rows = begun.masks, begun.rows
        jobs = {matcher.job for _, matcher in rows if matcher.job and not matcher.is_slow}
        done = wait(jobs, MAX_WAIT).done if jobs else ()
        eos, late = self._get_tools().eos_token_ids, []
        for row, matcher in rows:
            if matcher.job is None or matcher.job in done or matcher.is_ready:
                if matcher.has_own_memory and matcher.mask is not None:
                    masks[row] = matcher.mask
                self._finish(matcher, masks, row, eos)
            else:
                matcher.seconds = None if not matcher.is_slow else matcher.seconds
                matcher.is_quick = False  # for good: one may be slow again
                late.append(row)
                self._has_late |= not matcher.has_own_memory  # until the next masks begin
        return masks, late

    def wait(self, matchers: list[Matcher]) -> None:
        """Wait for the mask of one of them, but not for long."""
        jobs = [matcher.job for matcher in matchers if matcher.job is not None]
        wait(jobs, 10 * MAX_WAIT, FIRST_COMPLETED)

    def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)
        if self._tools is not None:
            for threads in (self._tools.thread, self._tools.slow_threads):
                threads.shutdown(wait=False, cancel_futures=True)

    def _begin_later(self, matcher: Matcher, text: str) -> None:
        try:
            compiled = self._compiled(text)
            matcher.begin(compiled)
        except BaseException:
            matcher.mask = np.zeros(self._num_words, np.int32)  # the sequence ends by it
            raise
        self._loading.submit(self._add_start, compiled, text)

    def _add_start(self, compiled: Compiled, text: str) -> None:
        """Have one more, if there are threads for it; only one thread calls this."""
        if len(compiled.starts) < self._get_tools().num_threads:
            compiled.starts.append(run_bounded(self._parse, text))

    def _compiled(self, text: str) -> Compiled:
        with self._lock:
            compiled = self._cache.get(text)
            if compiled is not None:
                self._cache.move_to_end(text)
                return compiled
        self._get_tools()  # loading a tokenizer takes a while, and is not a part of compiling
        compiled = run_bounded(self._compile, text)
        with self._lock:
            self._cache[text] = compiled
            if len(self._cache) > NUM_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _memory_for(self, num_rows: int, allocate: Allocate) -> IntColumn:
        """Return memory for masks; what late ones are still written to is left to them."""
        memory = self._memory
        if memory is None or len(memory) < num_rows or self._has_late:
            memory = self._memory = allocate(1 << (num_rows - 1).bit_length(), self._num_words)
        self._has_late = False
        return memory[:num_rows]

    def _fill_now(self, rows: list[tuple[int, Matcher]], masks: IntColumn) -> None:
        """Compute masks that were quick so far: to wake another thread takes as long as they do."""
        start = time.perf_counter()
        try:
            _fill_all(self._get_tools().executor, _side_by_side(rows), masks)
        except Exception:  # there it ends the rows, not the engine
            self._begin(rows, masks)
        if time.perf_counter() - start > MAX_WAIT:
            for _, matcher in rows:
                matcher.is_quick, matcher.seconds = False, None

    def _begin(self, rows: list[tuple[int, Matcher]], masks: IntColumn) -> None:
        """Let masks be computed: those that may take long each by itself, to see which do."""
        tools = self._get_tools()
        together: list[tuple[int, Matcher]] = []
        for row, matcher in rows:
            matcher.has_own_memory = matcher.seconds is None or matcher.is_slow
            if matcher.has_own_memory:  # late ones keep the next step's masks where they are
                matcher.mask = np.empty(self._num_words, np.int32)
                matcher.job = tools.slow_threads.submit(_fill_one, matcher, matcher.mask)
            else:
                matcher.mask = masks[row]
                together.append((row, matcher))
        if together:
            job = tools.thread.submit(_fill_all, tools.executor, _side_by_side(together), masks)
            for _, matcher in together:
                matcher.job = job
                if matcher.is_quick is None:
                    matcher.is_quick = True  # unless it is late

    def _finish(self, matcher: Matcher, masks: IntColumn, row: int, eos: frozenset[int]) -> None:
        has_failed = matcher.job is not None and matcher.job.exception() is not None
        if has_failed or matcher.inner.is_error():
            masks[row] = 0  # no token: the sequence ends with an error
        elif matcher.stop_token_ids != eos:
            _allow_stops(matcher, masks[row], eos)

    def _compile(self, text: str) -> Compiled:
        matcher = self._parse(text)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise refusal("; ".join(warnings))
        first_mask, *_ = self._first_masks(matcher.deep_copy())
        return Compiled([matcher], first_mask)

    def _parse(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        tools = self._get_tools()
        return LLMatcher(tools.tokenizer, text, log_level=0, limits=tools.limits)

    def _first_masks(self, matcher: LLMatcher) -> Iterator[IntColumn]:
        """Follow an answer for some tokens, whichever they are: some grammars fail only there."""
        for _ in range(NUM_TRIED):
            mask = np.zeros(self._num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                reason = matcher.get_error()
                raise refusal(f"no answer fits, or it is too much work to follow: {reason}")
            yield mask
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            bits[list(self._get_tools().eos_token_ids)] = 0
            if not bits.any() or not matcher.consume_token(int(bits.argmax())):
                return

    def _get_tools(self) -> Tools:
        with self._lock:
            if self._tools is None:
                self._tools = self._make_tools()
            return self._tools

    def _make_tools(self) -> Tools:
        vocabulary = self._load()
        if vocabulary.tokenizer is None:
            raise GrammarError("needs a tokenizer, not skip_tokenizer_init=True")
        try:
            from llguidance import LLExecutor, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise GrammarError("needs the package: pip install llguidance") from error
        text, eos = vocabulary.tokenizer.backend_tokenizer.to_str(), vocabulary.eos_token_ids
        try:
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(eos) or None)
        except ValueError as error:
            raise GrammarError(f"does not work with this model's tokenizer: {error}") from error
        num_threads = min(max((os.cpu_count() or 1) - 1, 1), MAX_THREADS)
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        described = {"tokenizer": text, "vocab_size": self._vocab_size, "limits": LIMITS}
        described["eos"] = sorted(eos) or None
        return Tools(tokenizer, eos, limits, num_threads, described, LLExecutor(num_threads))


def _key(asked: Mapping[str, Any]) -> str | None:
    """Return the request as JSON; None if it is nested too deeply, which is refused later."""
    try:
        return json.dumps(asked)
    except (RecursionError, TypeError, ValueError):
        return None


def _side_by_side(rows: list[tuple[int, Matcher]]) -> list[tuple[LLMatcher, int]]:
    """Return matchers for the threads, which begin at different places: the copies of one, next to
    each other, get in the way of each other least."""
    return [(m.inner, row) for row, m in sorted(rows, key=lambda each: id(each[1].start))]


def _fill_all(
    executor: LLExecutor, matchers: list[tuple[LLMatcher, int]], masks: IntColumn
) -> None:
    """Fill the rows of masks, which this call keeps alive."""
    executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))


def _fill_one(matcher: Matcher, mask: IntColumn) -> None:
    start = time.perf_counter()
    matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    matcher.seconds = time.perf_counter() - start


def _allow_stops(matcher: Matcher, mask: IntColumn, eos: frozenset[int]) -> None:
    """Allow the sequence's own stop tokens where the answer may end; the model's, if ignored,
    only where it must."""
    if not matcher.inner.is_accepting():  # then the model's are not allowed anyway
        for token_id in matcher.stop_token_ids:
            allow(mask, token_id, False)
        return
    given = mask.copy()
    for token_id in eos | matcher.stop_token_ids:
        allow(mask, token_id, token_id in matcher.stop_token_ids)
    if not mask.any():
        mask[:] = given


def allow(mask: IntColumn, token_id: int, is_allowed: bool) -> None:
    bit = np.uint32(1 << token_id % 32)
    words = mask.view(np.uint32)
    words[token_id // 32] &= ~bit
    if is_allowed:
        words[token_id // 32] |= bit


def refusal(reason: str) -> GrammarError:
    if "coerce_one_of" in reason:  # an option of llguidance's, which is not offered
        reason = "the options of 'oneOf' are not plainly disjoint"
    if reason.startswith("circular references"):
        reason = "a '$ref' in 'oneOf' or beside other keywords leads back to itself; try 'anyOf'"
    if reason.startswith("regex parse error"):
        reason = f"a 'pattern' is no regular expression: {reason}"
    return GrammarError(f"cannot be enforced: {reason.strip()}")
