"""The live view on a virtual screen: lines, order, status, and the figures it shows."""

from __future__ import annotations

import io
import random
from typing import cast

import pytest

from nanovllm.cli.live import LiveView
from nanovllm.cli.run_stats import RunStats
from nanovllm.cli.terminal import (
    PlainScreen,
    TerminalScreen,
    WrappedText,
    char_width,
    printable,
    wrap,
)
from nanovllm.outputs import RequestOutput, StepOutput, StreamPiece
from tests.cli.virtual_screen import VirtualScreen

WORDS = [
    "a",
    "to",
    "wonderful",
    "internationalisation",
    "  ",
    "\n",
    "\n\n",
    "日本語",
    "🙂",
    "e\u0301",
]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two three", ["one two", "three"]),
        ("one two\n", ["one two", ""]),
        ("exactly8", ["exactly8"]),
        ("exactly8 next", ["exactly8", "next"]),
        ("overlong-word", ["overlong", "-word"]),
        ("    indented text", ["    inde", "nted", "text"]),
        ("日本語日本語", ["日本語日", "本語"]),
        ("cafe\u0301 cafe\u0301", ["cafe\u0301", "cafe\u0301"]),
    ],
)
def test_wrap_breaks_at_spaces_where_it_can(text: str, lines: list[str]) -> None:
    assert wrap(text, 8) == lines


@pytest.mark.parametrize("seed", range(20))
def test_wrapping_piece_by_piece_equals_wrapping_at_once(seed: int) -> None:
    rng = random.Random(seed)
    text, width = random_text(rng), rng.randint(8, 40)
    lines, open_line = [], ""
    for piece in random_pieces(rng, text):
        *done, open_line = wrap(open_line + piece, width)
        lines += done
    assert [*lines, open_line] == wrap(text, width)
    assert all(sum(map(char_width, line)) <= width for line in lines)
    assert "".join("".join([*lines, open_line]).split()) == "".join(text.split())


@pytest.mark.parametrize("seed", range(20))
def test_the_status_stays_below_the_text(seed: int) -> None:
    """After every draw the screen holds exactly the text so far, wrapped, and the status."""
    rng = random.Random(seed)
    terminal = VirtualScreen(width := rng.randint(12, 50))
    screen = TerminalScreen(terminal, lambda: width)  # type: ignore[arg-type]
    text = ""
    for count, piece in enumerate(random_pieces(rng, random_text(rng))):
        screen.write(piece)
        text += piece
        if rng.random() < 0.7:
            screen.draw(f"status {count} that is much too long for a narrow terminal")
            assert terminal.rows[:-1] == expected_rows(text, width)
            assert terminal.rows[-1].startswith(f"status {count}")
    screen.close()
    rows = expected_rows(text, width)
    assert terminal.rows == (rows if text.endswith("\n") else [*rows, ""])
    assert terminal.column == 0


def test_a_model_cannot_steer_the_terminal() -> None:
    terminal = VirtualScreen(40)
    screen = TerminalScreen(terminal, lambda: 40)  # type: ignore[arg-type]
    screen.heading("ask\x1b[2J")
    screen.write("a\x1b]0;title\x07b\x9b5A\rc\td")
    screen.close()
    assert terminal.rows == ["ask[2J", "a]0;titleb5Ac    d", ""]
    assert printable("é\n日本") == "é\n日本"


def test_answers_stream_in_the_order_of_the_prompts() -> None:
    terminal = VirtualScreen(80)
    screen = TerminalScreen(terminal, lambda: 80)  # type: ignore[arg-type]
    view = LiveView(["first?", "second?", "third?"], 4, screen, frame_seconds=0.0)
    view.on_step(StepOutput([], [], 12, 0))
    view.show(piece(1, "two"))
    view.show(piece(0, "one"))
    assert terminal.rows[:2] == ["[1/3] first?", "one"]
    view.show(piece(2, "three", is_last=True))
    view.show(piece(0, " and"))
    assert terminal.rows[:2] == ["[1/3] first?", "one and"]
    assert terminal.rows[-1].startswith("[###########---------] 1/3 | prefill ")
    view.show(piece(0, " done", is_last=True))
    assert terminal.rows[:5] == ["[1/3] first?", "one and done", "", "[2/3] second?", "two"]
    view.show(piece(1, ".", is_last=True))
    view.close()
    assert terminal.rows[3:] == ["[2/3] second?", "two.", "", "[3/3] third?", "three", ""]


def test_a_pipe_gets_text_as_it_comes_and_no_control_characters() -> None:
    out = io.TextIOWrapper(buffer := io.BytesIO())
    with LiveView(["first?", "second?"], 4, PlainScreen(out), frame_seconds=0.0) as view:
        view.show(piece(0, "one"))
        assert buffer.getvalue() == b"[1/2] first?\none"
        view.show(piece(1, "two", is_last=True))
        assert buffer.getvalue() == b"[1/2] first?\none"
        view.show(piece(0, "!", is_last=True))
        assert buffer.getvalue() == b"[1/2] first?\none!\n\n[2/2] second?\ntwo\n"
    assert buffer.getvalue().endswith(b"two\n")


def test_prompts_without_an_answer_are_passed_over() -> None:
    out = io.StringIO()
    with LiveView(["a", "b", "c", "d"], 4, PlainScreen(out)) as view:
        view.skip(0)
        view.skip(2)
        view.show(piece(3, "four", is_last=True))
        view.show(piece(1, "two", is_last=True))
    assert out.getvalue() == "[2/4] b\ntwo\n\n[4/4] d\nfour\n"


def test_a_status_is_there_before_the_first_step() -> None:
    terminal = VirtualScreen(80)
    with LiveView(["a long one"], 4, TerminalScreen(terminal, lambda: 80)):  # type: ignore[arg-type]
        assert terminal.rows[-1].startswith("[--------------------] 0/1 | prefill 0 tok/s")


def test_the_clock_of_a_run_can_be_stopped() -> None:
    times = iter([0.0, 1.0, 11.0, 13.0, 13.0])
    stats = RunStats(clock=lambda: next(times))
    stats.pause()  # at 1
    stats.resume()  # at 11
    stats.add_step(StepOutput([], [], 10, 0))  # at 13
    assert stats.prefill.seconds == 2.0
    assert stats.seconds == 3.0


def test_a_single_answer_can_go_without_a_heading() -> None:
    out = io.StringIO()
    with LiveView(["x"], 4, PlainScreen(out), has_headings=False) as view:
        view.show(piece(0, " text", is_last=True))
    assert out.getvalue() == " text\n"


def test_a_mixed_step_shares_its_time_out_by_tokens() -> None:
    times = iter([0.0, 2.0, 3.0, 4.0, 4.0])
    stats = RunStats(clock=lambda: next(times))
    stats.add_step(StepOutput([], [], 100, 0))  # 2 s
    stats.add_step(StepOutput([], [], 0, 0))  # fills a pipeline and takes no tick of its own
    stats.add_step(StepOutput([], [], 30, 10))  # 1 s
    stats.add_step(StepOutput([], [], 0, 10))  # 1 s
    assert (stats.prefill.num_tokens, stats.decode.num_tokens) == (130, 20)
    assert stats.prefill.speed == pytest.approx(130 / 2.75)
    assert stats.decode.speed == pytest.approx(20 / 1.25)


def test_the_summary_adds_up() -> None:
    view = LiveView(["a", "b"], 4, PlainScreen(io.StringIO()))
    view.on_step(StepOutput([], [], 6, 0))
    view.show(piece(0, "x", is_last=True))
    view.show(piece(1, "y", is_last=True))
    summary = dict(line.split(maxsplit=1) for line in view.summary().splitlines())
    assert summary["prompts"] == "2, 6 tokens"
    assert summary["generated"].startswith("2 tokens in ")
    assert summary["prefill"].endswith("tok/s (6 tokens)")
    assert summary["prefix"] == "cache  2 of 6 prompt tokens"
    assert summary["first"] == "token   after 0.50 s on average"
    assert summary["finished"] == "2 by stop"


def piece(index: int, text: str, is_last: bool = False) -> StreamPiece:
    output = RequestOutput(index, None, [1, 2, 3], text, [7], "stop", 1, 0.5, 1.0)
    return StreamPiece(index, text, [7], output if is_last else None, index=index)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(60))


def random_pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=25))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def expected_rows(text: str, width: int) -> list[str]:
    return [cast(str, line).rstrip() for line in wrap(text, width - 1)]


def test_text_of_a_chat_breaks_between_words() -> None:
    screen = VirtualScreen(20)
    text = "A word at the edge goes\nto the next line as a whole. 漢字漢字 漢字漢字"
    shown = WrappedText(screen, lambda: 20)  # type: ignore[arg-type]
    for start in range(0, len(text), 3):
        shown.write(text[start : start + 3] + "\x1b")
    assert screen.rows == [
        "A word at the edge",
        "goes",
        "to the next line as",
        "a whole. 漢字漢字",
        "漢字漢字",
    ]
