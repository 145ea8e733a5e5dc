"""The package has the types that it says; as a test, so that other tests can run meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kept_kernels import CACHE

ROOT = Path(__file__).parents[1]


def test_types() -> None:
    """Without the results of an earlier run it takes half a minute, on one core.

    They are kept outside the clone: mypy compares the contents of files whose times differ.
    """
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE / "mypy"), "nanovllm"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
