"""Generated text on a terminal and in a pipe: order, line wrapping and statistics."""

from __future__ import annotations

import io
import random
import sys

import pytest
from rich.cells import cell_len

from nanovllm.cli.output import RunStats, TextView, in_order, print_in_order, printable
from nanovllm.outputs import RequestOutput, StreamPiece
from tests.cli.terminal_process import TerminalProcess


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return an 80-column terminal that shows text once, without redrawing."""
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize("seed", range(5))
def test_lines_on_a_terminal_break_between_words(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, terminal = random.Random(seed), open_terminal(monkeypatch)
    words = rng.choices(["a", "to", "wonderful", "[b]x[/b]", "日本語", "🙂", "e\u0301"], k=300)
    text = " ".join(words) + "\n\n  the end"
    cuts = sorted(rng.choices(range(len(text) + 1), k=200))
    with TextView() as view:
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            view.write(text[start:end] + "\x1b")
    *lines, blank, last = terminal.getvalue().splitlines()
    assert [word for line in lines for word in line.split()] == words
    assert all(60 < cell_len(line.rstrip()) <= 80 for line in lines[:-1])
    assert (blank.strip(), last) == ("", "  the end")


def test_control_characters_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    pieces = [piece(0, "a\x1b]0;title\x07b\x9b5A\rc\td", is_last=True)]
    print_in_order(pieces, ["ask\x1b[2J"], RunStats())
    lines = [line.rstrip() for line in terminal.getvalue().splitlines()]
    assert lines == ["[1/1] ask[2J", "a]0;titleb5Ac    d"]
    assert printable("é\n日本") == "é\n日本"


LIVE = """
from nanovllm.cli.output import RunStats, print_in_order
from nanovllm.outputs import RequestOutput, StreamPiece
def pieces():
    for index in range(2):
        yield StreamPiece(0, "one ", [], None, index=index)
        input()
        output = RequestOutput(0, None, [], "one two", [7], "stop", 0, 0.0, 0.0)
        yield StreamPiece(0, "two", [], output, index=index)
print_in_order(pieces(), ["first", "second"], RunStats())
print("The end.")
"""


def test_a_bar_is_below_the_text_while_it_grows() -> None:
    process = TerminalProcess("-c", LIVE)
    try:
        process.wait_for(lambda text: "one" in text and "0/2 " in text)
        process.send("\r")
        process.wait_for(lambda text: "[2/2] second" in text and "1/2 " in text)
        process.send("\r")
        assert process.wait() == 0
    finally:
        process.close()
    assert process.text.index("one two") < process.text.index("The end.")


def test_a_pipe_receives_text_as_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    shown = []

    def pieces() -> list[StreamPiece]:
        for each in (
            piece(0, "one"),
            piece(1, "two", is_last=True),
            piece(0, "!\x1b[1m", is_last=True),
        ):
            yield each
            shown.append(out.getvalue())

    print_in_order(pieces(), ["first?", "second?"], RunStats())
    assert shown[:2] == ["[1/2] first?\none"] * 2
    assert out.getvalue() == "[1/2] first?\none!\x1b[1m\n\n[2/2] second?\ntwo\n"


def test_pieces_come_in_the_order_of_the_prompts() -> None:
    given = [piece(2, "c", is_last=True), piece(1, "b"), piece(0, "a1"), piece(0, "a2", True)]
    given += [piece(1, "b2", is_last=True)]
    assert [each.text for each in in_order(given)] == ["a1", "a2", "b", "b2", "c"]


def test_failed_prompts_without_text_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    failed = RequestOutput(0, None, [], "", [], "error", 0, 0.0, 0.0, error="too long")
    given = [StreamPiece(0, "", [], failed, index=index) for index in (2, 0)]
    given += [piece(3, "four", is_last=True), piece(1, "two", is_last=True)]
    outputs = print_in_order(given, ["a", "b" * 300, "c", "d"], RunStats())
    assert [output.error for output in outputs] == ["too long", None, "too long", None]
    assert capsys.readouterr().out == "[2/4] ...\ntwo\n\n[4/4] d\nfour\n"


def test_the_summary_adds_up() -> None:
    stats = RunStats()
    list(stats.count([piece(0, "x", is_last=True), piece(1, "y", is_last=True)]))
    summary = dict(line.split(maxsplit=1) for line in stats.summary().splitlines())
    assert summary["prompts"] == "2, 6 tokens"
    assert summary["generated"].startswith("2 tokens in ")
    assert summary["speed"].endswith(" tok/s")
    assert summary["prefix"] == "cache  2 of 6 prompt tokens"
    assert summary["first"] == "token   after 0.50 s on average"
    assert summary["finished"] == "2 by stop"


def piece(index: int, text: str, is_last: bool = False) -> StreamPiece:
    output = RequestOutput(index, None, [1, 2, 3], text, [7], "stop", 1, 0.5, 1.0)
    return StreamPiece(index, text, [7], output if is_last else None, index=index)
