"""The CUDA path as a whole, without a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_an_engine_of_interpreted_kernels() -> None:
    """Triton must know before it is imported that it is to interpret: a process of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.worker.interpreted_engine"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
