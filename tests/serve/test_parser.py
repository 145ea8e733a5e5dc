"""The parser's events do not depend on chunk boundaries, and no text is lost or duplicated."""

from __future__ import annotations

import codecs
import random
import re
import time
from collections.abc import Callable, Iterator

import pytest

from nanovllm.serve.parsing.events import BlockDelta, BlockEvent, BlockStart, BlockStop
from nanovllm.serve.parsing.formats import choose_formats
from nanovllm.serve.parsing.parser import OutputParser, new_call_id
from tests.serve.output_cases import (
    CASES,
    FORMATS,
    HARD,
    TOOLS,
    Case,
    coder,
    found,
    hermes,
    llama,
    merge,
)

MARKERS = (
    "<tool_call>", "</tool_call>", "<function=", "get", "get_weather", ">", "\n", " ", "x",
    "<parameter=", "city>", "</parameter>", "</function>", '{"name": "', '", ', '"', "{", "}", "[",
    "]", '"arguments": ', '"parameters": {', "\\", ",", ";", ":", "1", "[TOOL_CALLS]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|python_tag|>", "<think>", "</think>", "é",
)  # fmt: skip

# Parts of calls that emit no events; the last one is a name that was cut off.
DROPPED = re.compile(r'"id"|"type"|\[CALL_ID\]|<parameter=[^>\n]*\Z')


def pieces_of(text: str, rng: random.Random) -> Iterator[str]:
    """Split the bytes of a text anywhere, and yield characters when they are complete."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = text.encode()
    num_cuts = rng.choice((1, 2, 5, len(data)))
    cuts = sorted(rng.randint(0, len(data)) for _ in range(num_cuts))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield decoder.decode(data[start:end])


def garbage(rng: random.Random) -> str:
    """Join markers and parts of real texts."""
    parts = []
    for _ in range(rng.randint(1, 15)):
        text = rng.choice(CASES).text
        start, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        parts.append(rng.choice((rng.choice(MARKERS), text[:end], text[start:end], text[start:])))
        parts.append(rng.choice(("", "ß")))
    return "".join(parts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}:{case.text!r:.60}")
def test_what_a_text_holds(case: Case) -> None:
    assert case.read([case.text]) == list(case.found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}:{case.text!r:.60}")
def test_every_single_cut_and_single_characters(case: Case) -> None:
    for i in range(len(case.text)):
        assert case.read([case.text[:i], "", case.text[i:]]) == list(case.found)
    assert case.read(case.text) == list(case.found)


@pytest.mark.endurance
def test_random_cuts(count: Callable[[int], int]) -> None:
    rng = random.Random(1)
    for _ in range(count(10_000)):
        case = rng.choice(CASES)
        assert case.read(pieces_of(case.text, rng)) == list(case.found)


@pytest.mark.endurance
def test_garbage(count: Callable[[int], int]) -> None:
    """Nothing raises, boundaries do not matter, calls are in order, and no text is lost."""
    rng = random.Random(2)
    num_calls = 0
    for _ in range(count(10_000)):
        reasoning = rng.choice((None, "qwen3"))
        case = Case(garbage(rng), (), rng.choice(FORMATS), reasoning, rng.random() < 0.2)
        events = case.read([case.text])
        assert case.read(pieces_of(case.text, rng)) == events
        borders = [event for event in events if isinstance(event, BlockStart | BlockStop)]
        assert [event.index for event in borders] == sorted([*range(len(borders) // 2)] * 2)
        calls = [event for event in events if isinstance(event, BlockStart) and event.name]
        num_calls += len(calls)
        check_conserved(case.text, events)
        if not calls and reasoning is None:
            assert events == list(found(*filter(None, [case.text])))
    assert num_calls > count(10_000) // 10


def check_conserved(text: str, events: list[BlockEvent]) -> None:
    """Content and reasoning are substrings of the text; no ß, which no marker has, is lost."""
    position = num_found = 0
    for event in events:
        if not isinstance(event, BlockDelta):
            continue
        num_found += event.text.count("ß")
        if event.kind != "tool_call":
            start = text.find(event.text, position)
            assert start >= 0
            position = start + len(event.text)
    if not DROPPED.search(text):
        assert num_found == text.count("ß")


def test_arguments_stream_as_they_come() -> None:
    for text, form in ((hermes(HARD), "hermes"), (llama(HARD), "llama3_json")):
        parser = Case(text, (), form).parser()
        start = text.index(HARD)
        events = parser.feed(text[: start + 1])
        assert isinstance(events[0], BlockStart)
        for i in range(start + 1, start + len(HARD) - 1):
            assert parser.feed(text[i]) == [BlockDelta(0, "tool_call", text[i])]


def test_strings_in_tags_stream_as_they_come() -> None:
    text = coder('city>\nHe said "no"')
    parser = Case(text, (), "qwen3_coder").parser()
    start = text.index("He")
    parser.feed(text[:start])
    assert parser.feed('He said "') == [BlockDelta(0, "tool_call", 'He said \\"')]


def test_content_streams_as_it_comes() -> None:
    parser = Case("", (), "hermes", "qwen3").parser()
    assert parser.feed("Hello <") == [BlockStart(0, "text"), BlockDelta(0, "text", "Hello ")]
    assert parser.feed("b> <tool_") == [BlockDelta(0, "text", "<b> ")]
    assert parser.feed("box>") == [BlockDelta(0, "text", "<tool_box>")]
    assert parser.finish(is_complete=False) == [BlockStop(0, "text", is_complete=False)]


def test_without_a_format_everything_is_content() -> None:
    parser = OutputParser()
    assert [*parser.feed(hermes("{}")), *parser.finish()] == list(found(hermes("{}")))


@pytest.mark.parametrize("rest", ["\n<to", "\n<tool_call>\n", '\n<tool_call>\n{"name": "get_we'])
def test_an_answer_of_calls_alone_has_no_content(rest: str) -> None:
    formats, ids = choose_formats("", "hermes", None), iter(("id0", "id1"))
    parser = OutputParser(TOOLS, formats.tools, new_id=ids.__next__, has_content=False)
    events = [event for char in hermes("{}") + rest for event in parser.feed(char)]
    assert merge([*events, *parser.finish()]) == list(found(("get_weather", "{}")))


def test_ids_are_what_templates_accept() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize("form", FORMATS)
def test_long_texts_take_linear_time(form: str) -> None:
    texts = {
        "markers": "".join(MARKERS) * 50,
        "braces": '{"name": "' * 2_000,
        "arguments first": '<tool_call>{"arguments": {"a": "' + "<tool_call>{" * 2_000,
        "nesting": hermes("[" * 20_000).replace(": [", ': {"a": ['),
        "call": hermes('{"a": "' + "x\n" * 20_000 + '"}'),
    }
    for text in texts.values():
        case = Case(text, (), form)
        start = time.thread_time()
        whole = case.read([text])
        assert case.read(text[i : i + 7] for i in range(0, len(text), 7)) == whole
        assert time.thread_time() - start < 5
