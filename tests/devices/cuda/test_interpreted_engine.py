"""The CUDA path as a whole, without a CUDA device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.cli.terminal_process import run_program
from tests.devices import run_interpreted


@pytest.mark.slow
def test_an_engine_of_interpreted_kernels() -> None:
    run_interpreted("tests.devices.cuda.interpreted_engine")


@pytest.mark.slow
def test_engines_launch_what_was_compiled_ahead() -> None:
    result = run_program("-m", "tests.devices.cuda.launched_kernels")
    assert result.returncode == 0, result.stderr
