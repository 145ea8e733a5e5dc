"""Limits on the grammars of requests: their size, and the time and stack used to compile them."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from nanovllm.errors import GrammarError

T = TypeVar("T")

MAX_CHARS = 64 * 1024  # per schema, grammar, regular expression or list of choices
MAX_RULES = 1_000
MAX_REFERENCES = 1_000
MAX_DEPTH = 100  # levels of nested JSON; llguidance limits grammars and regular expressions itself
MAX_SECONDS = 5.0
START_SECONDS = 5.0  # time for a child process to start, added to MAX_SECONDS
MAX_THREADS = 8  # maximum number of compiling threads, including those that timed out but still run
STACK_SIZE = 256 * 2**20  # virtual memory; llguidance uses 10 kB or more per level of recursion
TOO_SLOW = "cannot be enforced: it takes too long to compile; simplify the grammar or schema"
TOO_MANY = "too many grammars are being compiled; try again later"
# Intersections of many expressions, and a large multipleOf, can take hours and exhaust memory.
_RISKY = re.compile(r"pattern|&")
_MAX_RISKY = 8
_LARGE_MULTIPLE = re.compile(r"multipleOf\W+[\d.]{0,20}(?:\d{5}|[eE])")
_TRIAL = """
import json, signal, sys, threading
signal.alarm(10)  # exit even if the parent has died
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

def compile():
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos"])
    limits = LLParserLimits(**given["limits"])
    LLMatcher(tokenizer, given["grammar"], log_level=0, limits=limits).compute_bitmask()

given = json.load(sys.stdin)
threading.stack_size(given["stack_size"])
threading.Thread(target=compile).start()
"""

_RULE = re.compile(r'^[ \t]*[?!]?\w[^:"\n/]*:', re.MULTILINE)
_starting = threading.Lock()  # the stack size of new threads is a process-wide setting
_slots = threading.BoundedSemaphore(MAX_THREADS)
_trials = threading.BoundedSemaphore(2)


def check_text(text: str) -> None:
    """Raise GrammarError if a grammar or other text to compile is too large."""
    _check("characters", len(text), MAX_CHARS)
    _check("rules", len(_RULE.findall(text)), MAX_RULES)
    _check("references", text.count('"$ref"'), MAX_REFERENCES)
    if "%json" in text and "\\u" in text:  # escapes could hide keywords from `is_risky`
        raise GrammarError("%json must not contain \\u escapes")


def check_schema(schema: Any) -> None:
    """Raise GrammarError if a JSON schema is too large or nested too deeply."""
    level, depth = [schema], 0
    while level := [each for part in level for each in _children(part)]:
        depth += 1
        _check("levels of nesting", depth, MAX_DEPTH, "the JSON schema is nested too deeply: ")
    check_text(json.dumps(schema, ensure_ascii=False))


def is_risky(text: str) -> bool:
    return len(_RISKY.findall(text)) > _MAX_RISKY or _LARGE_MULTIPLE.search(text) is not None


def try_compiling(text: str, tokenizer: Mapping[str, Any]) -> None:
    """Compile a risky grammar in a child process first, since a thread cannot be killed."""
    given = json.dumps({**tokenizer, "grammar": text, "stack_size": STACK_SIZE}).encode()
    command, seconds = [sys.executable, "-c", _TRIAL], START_SECONDS + MAX_SECONDS
    if not _trials.acquire(timeout=MAX_SECONDS):
        raise GrammarError(TOO_MANY)
    try:
        trial = subprocess.run(command, input=given, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise GrammarError(TOO_SLOW) from error
    finally:
        _trials.release()
    if trial.returncode < 0:
        raise GrammarError("cannot be enforced: llguidance crashes")


def run_bounded(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread with a large stack; raise GrammarError if it takes too long."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            _slots.release()

    thread = threading.Thread(target=work, name="nanovllm-compile", daemon=True)
    if not _slots.acquire(timeout=MAX_SECONDS):
        raise GrammarError(TOO_MANY)
    with _starting:
        size_before = threading.stack_size(STACK_SIZE)
        try:
            thread.start()
        finally:
            threading.stack_size(size_before)
    try:
        return outcome.result(MAX_SECONDS)
    except FutureTimeoutError as error:
        # Stop the thread: Python code ends at its next line, but a call into llguidance continues,
        # and the thread counts toward MAX_THREADS until it returns.
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        raise GrammarError(TOO_SLOW) from error


def _children(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if type(value) is list else []


def _check(what: str, number: int, limit: int, reason: str = "") -> None:
    if number > limit:
        raise GrammarError(f"{reason}it has {number:,} {what}, more than the limit of {limit:,}")
