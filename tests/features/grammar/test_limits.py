"""A request's grammar can neither crash the process nor make other requests wait."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine.input_processor import Vocabulary
from nanovllm.errors import GrammarError
from nanovllm.features.grammar import limits
from nanovllm.features.grammar.guidance import GuidanceEngine, GuidanceGrammar
from tests.features.grammar.fuzz import VOCAB_SIZE, new_grammars

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def grammars() -> GuidanceEngine:
    return new_grammars()


def chained_rules(number: int) -> dict[str, Any]:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(number))
    return {"grammar": f'start: r0\n{rules}r{number}: "a"'}


def chained_schemas(number: int) -> dict[str, Any]:
    parts = {f"{i}": {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(number)}
    return {"json": {"$ref": "#/$defs/0", "$defs": {**parts, f"{number}": {}}}}


def nested_schemas(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return {"json": schema}


def intersected(number: int) -> dict[str, Any]:
    terms = " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(number))
    return {"grammar": f"start: T\nT: {terms}"}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (chained_rules(1000), "1,002 rules"),
        (chained_schemas(1100), "1,101 references"),
        (nested_schemas(101), "nested too deeply"),
        (nested_schemas(300), "nested too deeply"),
        ({"regex": "a" * 65_537}, "65,537 characters"),
        ({"choice": ["a" * 40_000] * 2}, "80,000 characters"),
        ({"regex": "a", "after": "a" * 65_537}, "65,537 characters"),
        ({"json": {"description": "é" * 65_537}}, "characters"),
        ({"json": {"pattern": "[" * 60_000}}, "'pattern' at # "),
        ({"regex": "[" * 60_000}, "invalid regex"),
        ({"grammar": 'start: %json {"\\u0070attern": "a"}'}, "escapes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_grammars_are_refused(grammars: GuidanceEngine, asked: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        grammars.compile(asked)


@pytest.mark.parametrize("asked", [chained_rules(998), chained_schemas(999), nested_schemas(100)])
def test_grammars_within_the_limits_are_compiled(grammars: GuidanceEngine, asked: Any) -> None:
    """Both the API process and the engine process compile it, whatever their stack size."""
    grammar = grammars.compile(asked)
    matcher = new_grammars().matcher(GuidanceGrammar(grammar.text), frozenset())
    assert matcher.job is not None
    matcher.job.result()
    assert matcher.mask is not None
    assert matcher.mask.any()


def test_loading_the_tokenizer_has_no_limit(grammars: GuidanceEngine) -> None:
    names: list[str] = []

    def load() -> Vocabulary:
        names.append(threading.current_thread().name)
        return grammars._load()

    text = grammars.compile({"regex": "a"}).text
    matcher = GuidanceEngine(load, VOCAB_SIZE).matcher(GuidanceGrammar(text), frozenset())
    assert matcher.job is not None
    matcher.job.result()
    assert names
    assert "nanovllm-compile" not in names


def test_a_grammar_that_never_finishes_compiling_is_refused(
    grammars: GuidanceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(limits, "START_SECONDS", 0.5)
    threads = threading.active_count()
    with pytest.raises(GrammarError, match="too long to compile"):
        grammars.compile(intersected(30))
    assert threading.active_count() <= threads  # a process was killed; no thread keeps running


def test_python_code_that_never_returns_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.01)
    is_over = threading.Event()

    def go_on() -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            is_over.set()

    with pytest.raises(GrammarError, match="too long to compile"):
        limits.run_bounded(go_on)
    assert is_over.wait(60)


def test_concurrent_compilations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_slots", threading.BoundedSemaphore(1))
    may_end = threading.Event()
    with pytest.raises(GrammarError, match="too long to compile"):
        limits.run_bounded(may_end.wait)
    with pytest.raises(GrammarError, match="too many"):
        limits.run_bounded(may_end.wait)
    may_end.set()
    monkeypatch.setattr(limits, "MAX_SECONDS", 60.0)
    assert limits.run_bounded(lambda: 5) == 5


def test_a_compiled_grammar_does_not_wait_for_others(
    grammars: GuidanceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"choice": ["yes", "no"]}
    text = grammars.compile(asked).text
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_slots", threading.BoundedSemaphore(1))
    assert limits._slots.acquire()
    assert grammars.is_compiled(asked)
    assert grammars.compile(asked).text == text
    with pytest.raises(GrammarError, match="too many"):
        grammars.compile({"choice": ["other"]})


def test_concurrent_trials_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_trials", threading.BoundedSemaphore(1))
    with limits._trials, pytest.raises(GrammarError, match="too many"):
        limits.try_compiling("", {})


def test_stacks_of_other_threads_keep_their_size() -> None:
    before = threading.stack_size()
    limits.run_bounded(lambda: None)
    assert threading.stack_size() == before


@pytest.mark.endurance
def test_random_grammars_do_no_harm(count: Callable[[int], int]) -> None:
    """Run in a child process, since a stack overflow would end it."""
    number = count(2000)
    longest_wait = 1.0 if number == 2000 else 10.0  # in a short run, other tests load the machine
    for first in range(0, number, 200):
        command = [sys.executable, "-m", "tests.features.grammar.fuzz", str(first), "200"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        found = json.loads(done.stdout)
        assert found["longest_wait"] < longest_wait, done.stderr[-2000:]
        assert 40 <= found["taken"] <= 160
