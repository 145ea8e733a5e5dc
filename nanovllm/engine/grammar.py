"""Structured output as the engine sees it; `structured/` implements it.

A bitmask has a bit for each token: bit i % 32 of word i // 32 tells whether token i may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bitmasks = npt.NDArray[np.int32]
Allocate = Callable[[int, int], Bitmasks]  # of rows and words


class Grammar(Protocol):
    """A compiled grammar; pickled, it is compiled again by the process that receives it."""

    @property
    def text(self) -> str: ...


class Matcher(Protocol):
    """Follows the output of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Whether its next bitmask can be computed without waiting for another thread."""

    def finishes(self, token_id: int) -> bool:
        """Follow a token that is no stop token; True when nothing can come after it."""


class GrammarEngine(Protocol):
    """Compiles grammars, in any thread, and computes bitmasks in the engine's thread."""

    def compile(self, asked: Mapping[str, Any]) -> Grammar:
        """Compile `structured_outputs`; raise GrammarError if it cannot be enforced."""

    def is_compiled(self, asked: Mapping[str, Any]) -> bool: ...

    def matcher(self, grammar: Any, stop_token_ids: frozenset[int]) -> Matcher:
        """Return a matcher, which is not ready while its grammar is being compiled."""

    def masks(self, matchers: Sequence[Any], allocate: Allocate) -> tuple[Bitmasks, list[int]]:
        """Return the next bitmask of each matcher, and the rows whose bitmask is not ready.

        A matcher that is None belongs to a sequence that ended, and allows every token. The next
        call may reuse the memory.
        """

    def wait(self, matchers: list[Any]) -> None:
        """Wait until one of the matchers is ready, but not for long."""

    def close(self) -> None: ...
