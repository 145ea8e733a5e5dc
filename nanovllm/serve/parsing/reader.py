"""A reader of text that arrives in pieces; its coroutines yield when they need more text.

The coroutines' results depend only on the text, never on how it was split into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from nanovllm.engine.detokenizer import num_held

T = TypeVar("T")
Waits = Generator[None, None, T]  # yields when it needs more text, and finally returns a T


class Reader:
    def __init__(self) -> None:
        self.pos = 0  # offset from the start of the whole text
        self._text = ""
        self._start = 0  # offset of self._text in the whole text
        self._settled = 0  # text before this offset is no longer needed
        self._is_over = False

    def push(self, piece: str) -> None:
        self._text = self._text[self._settled - self._start :] + piece
        self._start = self._settled

    def close(self) -> None:
        self._is_over = True

    def settle(self) -> None:
        """Allow the text before the current position to be dropped."""
        self._settled = self.pos

    def since(self, pos: int) -> str:
        return self._text[pos - self._start : self.pos - self._start]

    def more(self) -> Waits[bool]:
        """Wait for more text; return False at the end of the text."""
        if self._is_over:
            return False
        yield
        return True

    def peek(self) -> Waits[str]:
        """Return the next character, or an empty string at the end of the text."""
        while self.pos - self._start == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self.pos - self._start]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Consume and return the part of a match that has arrived; more may follow."""
        match = pattern.match(self._text, self.pos - self._start)
        if match is None:
            return ""
        self.pos += len(match.group())
        return match.group()

    def skip(self, is_skipped: Callable[[str], bool]) -> Waits[None]:
        while (char := (yield from self.peek())) and is_skipped(char):
            self.pos += 1

    def accept(self, word: str, or_cut: bool = False) -> Waits[bool]:
        """Consume a word if it is next; with `or_cut`, the text may end in the middle of it."""
        while True:
            start = self.pos - self._start
            rest = self._text[start : start + len(word)]
            if not word.startswith(rest) or len(rest) == len(word):
                break
            if not (yield from self.more()):
                break
        is_accepted = rest == word or (or_cut and rest != "" and word.startswith(rest))
        if is_accepted:
            self.pos += len(rest)
        return is_accepted

    def accept_any(self, words: Iterable[str]) -> Waits[str]:
        for word in words:
            if (yield from self.accept(word)):
                return word
        return ""

    def accept_all(self, words: str, or_cut: bool = False) -> Waits[bool]:
        """Consume all words or none; whitespace may precede each. `*` is letters and digits."""
        start = self.pos
        for word in words.split():
            yield from self.skip(str.isspace)
            if word == "*":
                yield from self.skip(str.isalnum)
            elif not (yield from self.accept(word, or_cut)):
                self.pos = start
                return False
        return True

    def until(self, stops: Sequence[str], sink: Callable[[str], None]) -> Waits[str]:
        """Pass the text before the next stop to the sink; return the stop, or "" if none comes."""
        pattern = re.compile("|".join(map(re.escape, stops)) or "(?!)")
        while True:
            start = self.pos - self._start
            match = pattern.search(self._text, start)
            end = match.start() if match else len(self._text)
            if not match and not self._is_over:
                end -= num_held(self._text[start:], stops)
            self.pos = self._start + end
            sink(self._text[start:end])
            if match:
                return match.group()
            if not (yield from self.more()):
                return ""
