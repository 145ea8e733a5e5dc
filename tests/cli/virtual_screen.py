"""A terminal small enough to trust: it interprets what the live view writes, and nothing else."""

from __future__ import annotations

import re

from nanovllm.cli.terminal import char_width

_TOKEN = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([\s\S])")


class VirtualScreen:
    """Rows of cells. Text that would run over the right edge is an error, not a wrapped line."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.row = self.column = 0
        self._rows: list[list[str]] = [[]]

    @property
    def rows(self) -> list[str]:
        return ["".join(cells).rstrip() for cells in self._rows]

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def write(self, text: str) -> None:
        for match in _TOKEN.finditer(text):
            if match[3] is None:
                self._control(match[2], int(match[1] or 1) if match[2] == "A" else 0)
            elif match[3] == "\n":
                self._move(self.row + 1, 0)
            elif match[3] == "\r":
                self._move(self.row, 0)
            else:
                self._put(match[3])

    def _control(self, name: str, count: int) -> None:
        if name == "A":
            self._move(self.row - count, self.column)
        elif name == "J":
            del self._rows[self.row + 1 :]
            del self._rows[self.row][self.column :]
        else:
            assert name in "mhl", f"unknown control sequence {name!r}"  # styles and modes

    def _move(self, row: int, column: int) -> None:
        assert row >= 0, "the cursor leaves the screen"
        while row >= len(self._rows):
            self._rows.append([])
        self.row, self.column = row, column

    def _put(self, char: str) -> None:
        assert char.isprintable() or char_width(char) == 0, f"control character {char!r}"
        cells, width = self._rows[self.row], char_width(char)
        assert self.column + width < self.width, "text reaches the right edge"
        cells.extend(" " * (self.column - len(cells)))
        # A wide character fills its own cell and an empty one; a combining one joins its base.
        if width == 0:
            cells[self.column - 1] += char
        else:
            cells[self.column : self.column + width] = [char] + [""] * (width - 1)
        self.column += width
