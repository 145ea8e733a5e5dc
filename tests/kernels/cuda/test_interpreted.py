"""The Triton kernels equal plain torch in Triton's interpreter, which needs no CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.devices import run_interpreted

FOLDER = "tests.kernels.cuda.interpreted"
# The tests of these run the same cases compiled where there is a device.
ALSO_COMPILED = ("paged_attention_cases", "fused_cases", "experts_cases", "quantized_cases")


# Interpreted, a kernel is a thousand times slower: every change runs some of the cases.
MARKS = [pytest.mark.slow, pytest.mark.endurance]


@pytest.mark.parametrize("which", ["some", pytest.param("rest", marks=MARKS)])
def test_kernels_equal_the_reference(which: str, count: Callable[[int], int]) -> None:
    """All in one process, as its start takes as long as the cases of one module."""
    if which == "rest" and count(10) < 10:
        pytest.skip("make endurance runs the other cases, and a GPU runs them compiled")
    names = ("sampling_cases", *(() if torch.cuda.is_available() else ALSO_COMPILED))
    run_interpreted(",".join(f"{FOLDER}.{name}" for name in names), which)
