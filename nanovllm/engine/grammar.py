"""The engine's interface to structured output, which `structured/` implements.

A bitmask has one bit per token: bit i % 32 of word i // 32 tells whether token i may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bitmasks = npt.NDArray[np.int32]
Allocate = Callable[[int, int], Bitmasks]  # (num_rows, num_words) -> bitmasks


class Grammar(Protocol):
    """A compiled grammar. The process that unpickles one compiles it again."""

    @property
    def text(self) -> str: ...


class Matcher(Protocol):
    """Tracks the position in a grammar that the output of one sequence has reached."""

    @property
    def is_ready(self) -> bool:
        """Whether the next bitmask can be computed without waiting for another thread."""

    def finishes(self, token_id: int) -> bool:
        """Accept a token that is not a stop token; return True if no more tokens are allowed."""

    def num_allowed(self, drafts: list[int]) -> int:
        """Return how many leading drafts the grammar allows."""


class GrammarEngine(Protocol):
    """Compiles grammars in any thread, and computes bitmasks in the engine's thread."""

    def compile(self, asked: Mapping[str, Any]) -> Grammar:
        """Compile `structured_outputs`; raise GrammarError if it cannot be enforced."""

    def is_compiled(self, asked: Mapping[str, Any]) -> bool: ...

    def matcher(self, grammar: Any, stop_token_ids: frozenset[int]) -> Matcher:
        """Return a matcher; it is not ready while its grammar is being compiled."""

    def masks(
        self, rows: Sequence[tuple[Any, list[int]]], allocate: Allocate
    ) -> tuple[Bitmasks, list[int]]:
        """Return the bitmasks of each row, and the indices of the rows that are not ready.

        A row is a matcher and its drafts. It has a bitmask for the next token and one after each
        draft. A matcher of None, for a sequence that has ended, allows every token. The next call
        may reuse the memory.
        """

    def wait(self, matchers: list[Any]) -> None:
        """Wait until one of the matchers is ready, or until a short timeout."""

    def close(self) -> None: ...
