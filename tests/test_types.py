"""The package has the types that it says; as a test, so that other tests can run meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_types() -> None:
    """Without the results of an earlier run it takes half a minute, on one core."""
    command = [sys.executable, "-m", "mypy", "nanovllm"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
