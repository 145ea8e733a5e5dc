"""Two screens for text that grows: a terminal with a status line below it, and a plain file."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from typing import Protocol, TextIO

# A model's text must not steer the terminal: control characters go, tabs become spaces.
_CONTROLS: dict[int, str | None] = dict.fromkeys((*range(32), *range(127, 160)))
_CONTROLS |= {ord("\t"): "    ", ord("\n"): "\n"}
_REDRAW = "\r\x1b[1A\x1b[J"  # from the status line to the start of the open line; erase from there
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class Screen(Protocol):
    """Text grows by headings and pieces; `draw` shows it, with a status below where it can."""

    def heading(self, text: str) -> None: ...
    def write(self, text: str) -> None: ...
    def end_answer(self) -> None: ...
    def draw(self, status: str) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """A file or a pipe: text as it comes, no control characters."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def heading(self, text: str) -> None:
        self._out.write(text + "\n")

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()  # whoever reads gets every token at once

    def end_answer(self) -> None:
        self.write("\n")

    def draw(self, status: str) -> None:
        pass

    def close(self) -> None:
        pass


class TerminalScreen:
    """Keeps a status line under the text. Only the open line and the status are ever redrawn.

    Lines are broken here, one column short of the edge, so that one line is always one row.
    """

    def __init__(self, out: TextIO, width: Callable[[], int] | None = None) -> None:
        self._out = out
        self._width = width or (lambda: terminal_width(out))
        self._lines: list[str] = []  # complete, not drawn yet
        self._open_line = ""
        self._is_drawn = False

    def heading(self, text: str) -> None:
        assert not self._open_line, "a heading starts a line"
        lines = wrap(printable(text), self._width() - 1)
        self._lines.extend(_BOLD + line + _PLAIN for line in lines)

    def write(self, text: str) -> None:
        *lines, self._open_line = wrap(self._open_line + printable(text), self._width() - 1)
        self._lines.extend(lines)

    def end_answer(self) -> None:
        self.write("\n")

    def draw(self, status: str) -> None:
        self._redraw(self._open_line + "\n" + status[: self._width() - 1])
        self._is_drawn = True

    def close(self) -> None:
        """Take the status away and leave the cursor at the start of a line."""
        self._redraw(self._open_line + "\n" if self._open_line else "")
        self._is_drawn = False

    def _redraw(self, end: str) -> None:
        """Write in one go, so that nothing flickers: go back, new lines, then what may change."""
        back = _REDRAW if self._is_drawn else ""
        self._out.write(back + "".join(line + "\n" for line in self._lines) + end)
        self._out.flush()
        self._lines.clear()


class WrappedText:
    """Text that grows on a terminal; a word that does not fit moves to the next line."""

    def __init__(self, out: TextIO, width: Callable[[], int] | None = None) -> None:
        self._out, self._open_line = out, ""
        self._width = width or (lambda: terminal_width(out))

    def write(self, text: str) -> None:
        text = printable(text)
        *lines, last = wrap(self._open_line + text, self._width() - 1)
        if lines:
            text = "\r\x1b[J" + "\n".join([*lines, last])  # rewrites the open line
        self._out.write(text)
        self._out.flush()
        self._open_line = last


def open_screen(out: TextIO) -> Screen:
    """Choose by what `out` is connected to."""
    return TerminalScreen(out) if out.isatty() else PlainScreen(out)


def terminal_width(out: TextIO) -> int:
    """Columns of the terminal behind `out`; a terminal that does not know says 0."""
    return max(os.get_terminal_size(out.fileno()).columns or 80, 20)


def printable(text: str) -> str:
    return text.translate(_CONTROLS)


def wrap(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` columns, at spaces where possible.

    The last line is open: wrapping it again with more text behind it continues as if at once.
    """
    lines, line, columns = [], "", 0
    for char in text:
        if char == "\n":
            lines.append(line)
            line, columns = "", 0
            continue
        if columns + char_width(char) > width:
            done, line = _break_line(line, char)
            lines.append(done)
            columns = sum(map(char_width, line))
            if char == " ":
                continue
        line += char
        columns += char_width(char)
    return [*lines, line]


def char_width(char: str) -> int:
    """Columns of a character; when in doubt too many, which only breaks a line early."""
    if char == "\ufe0f":  # makes the symbol before it an emoji, two columns wide
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _break_line(line: str, char: str) -> tuple[str, str]:
    """Split a full line before `char`: what is complete, and what moves to the next line."""
    head, _, tail = line.rpartition(" ")
    if char == " " or not head.strip():
        return line, ""
    return head, tail
