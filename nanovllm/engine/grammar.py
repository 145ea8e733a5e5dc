"""The engine's interface to structured output, which `features/grammar` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nanovllm.engine.step import IntColumn

Allocate = Callable[[int, int], IntColumn]  # (num_rows, num_words) -> words of `Bitmasks`


class Grammar(Protocol):
    """A compiled grammar. Pickling keeps only its source, which the receiver compiles again."""

    @property
    def text(self) -> str: ...


class Matcher(Protocol):
    """The state of a grammar after the output tokens of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Whether the next bitmask can be computed without waiting for another thread."""

    def finishes(self, token_id: int) -> bool:
        """Advance by a token other than a stop token; return True if no token may follow."""

    def num_allowed(self, drafts: list[int]) -> int:
        """Return the number of leading draft tokens that the grammar allows."""


class GrammarEngine(Protocol):
    """Compiles grammars (for any thread) and computes bitmasks (for the engine's thread)."""

    def compile(self, asked: Mapping[str, Any]) -> Grammar:
        """Compile `structured_outputs`; raise GrammarError if it cannot be enforced."""

    def is_compiled(self, asked: Mapping[str, Any]) -> bool: ...

    def matcher(self, grammar: Any, stop_token_ids: frozenset[int]) -> Matcher:
        """Return a matcher; it is not ready while its grammar is being compiled."""

    def masks(
        self, rows: Sequence[tuple[Any, list[int]]], allocate: Allocate
    ) -> tuple[IntColumn, list[int]]:
        """Return the bitmasks of each row, and the indices of the rows that are not ready.

        A row is a matcher and its draft tokens. Its bitmasks are for the next token and for the
        token after each draft token. The next call may overwrite the bitmasks.
        """

    def close(self) -> None: ...
