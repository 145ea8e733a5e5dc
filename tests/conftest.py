"""Fixtures shared by the whole suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import TinyCheckpoint, shared_checkpoint


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoint_root: Path) -> Callable[[str], TinyCheckpoint]:
    """A tiny random checkpoint by variant name, made once per session."""
    return lambda variant: shared_checkpoint(checkpoint_root, variant)
