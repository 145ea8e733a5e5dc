"""Fixtures for commands that run inside the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def pipe() -> Iterator[Callable[[str], None]]:
    """Return a function that pipes a text into stdin, as a shell does."""
    before = os.dup(0)

    def put(text: str) -> None:
        reader, writer = os.pipe()
        os.dup2(reader, 0)
        os.close(reader)
        os.write(writer, text.encode())
        os.close(writer)

    yield put
    os.dup2(before, 0)
    os.close(before)


@pytest.fixture
def nothing(pipe: Callable[[str], None]) -> None:
    """Make stdin empty, whatever the tests were started with."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
