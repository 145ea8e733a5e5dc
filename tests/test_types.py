"""Type-check the package in a test, so that it runs in parallel with other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kept_kernels import CACHE

ROOT = Path(__file__).parents[1]


def test_types() -> None:
    """Without mypy's cache, this takes half a minute on one core.

    All clones share the cache: if modification times differ, mypy compares contents.
    """
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE / "mypy"), "nanovllm"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
