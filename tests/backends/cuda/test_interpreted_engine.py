"""The CUDA path as a whole, without a CUDA device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.devices import run_interpreted


@pytest.mark.slow
def test_an_engine_of_interpreted_kernels() -> None:
    run_interpreted("tests.backends.cuda.interpreted_engine")
